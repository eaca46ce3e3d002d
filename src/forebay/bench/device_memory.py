"""Device memory of a contestant, beside what forebay's ledger says of it.

[Note: ledger against peak] At rest, between two updates with all transfers done and gradients
cleared, what torch has allocated should be what the ledger counts: every byte beyond is one that
nobody accounted for. Under way, activations, gradients and workspaces come on top. They are those
of forward and backward alone, measured by the contestant `floor` of the same run: its peak less
what it holds at rest. So the peak is foretold as

    ledger at rest + (peak of floor - floor at rest)

without staging, which has to live in what activations leave free.
"""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING, Any

import torch

from forebay.tiers.ledger import Tier

if TYPE_CHECKING:
    from forebay.bench.spec import StepSpec
    from forebay.bench.training import Training

__all__ = ["allocator_settings", "at_rest", "cap_process", "foretold", "peaks", "reset_peaks"]


def allocator_settings() -> str:
    """The settings of torch's allocator that the environment gives, as a note under a table."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    given = [f"{name}={os.environ[name]}" for name in names if os.environ.get(name)]
    return " ".join(given) or "torch's own defaults"


def cap_process(spec: StepSpec) -> None:
    """Let the process have no more device memory than the specification's budget."""
    if spec.device_budget is not None and spec.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, spec.device_budget / total))


def reset_peaks(device: str) -> None:
    """Peaks begin at what is held now, and reserved memory that nobody uses goes back."""
    if device == "cuda":
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peaks(device: str) -> dict[str, int]:
    """Peaks since the last reset, and how often the allocator had to try again or gave up."""
    if device != "cuda":
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "device_peak_bytes": stats.get("allocated_bytes.all.peak", 0),
        "device_reserved_bytes": stats.get("reserved_bytes.all.peak", 0),
        "allocator_retries": stats.get("num_alloc_retries", 0),
        "allocator_ooms": stats.get("num_ooms", 0),
    }


def at_rest(training: Training) -> dict[str, int]:
    """What torch and the ledger hold once all is done; see [Note: ledger against peak]."""
    training.settle()
    found = {}
    if training.spec.device == "cuda":
        gc.collect()
        found["device_rest_bytes"] = torch.cuda.memory_allocated()
    engine = training.runner.engine
    if engine is not None:
        ledger = engine.ledger
        found["ledger_rest_bytes"] = ledger.bytes(Tier.DEVICE)
        found["ledger_peak_bytes"] = ledger.peak_bytes(Tier.DEVICE)
    return found


def foretold(result: dict[str, Any], floor: dict[str, Any] | None, *, of: str) -> int | None:
    """Bytes that a peak should have, from the ledger and the floor's activations.

    Args:
        result: Of a forebay variant.
        floor: Of forward and backward alone on the same tokens.
        of: "device_peak_bytes" or "device_reserved_bytes".
    """
    if floor is None or of not in floor or "ledger_rest_bytes" not in result:
        return None
    activations: int = floor[of] - floor["device_rest_bytes"]
    held: int = result["ledger_rest_bytes"]
    return activations + held
