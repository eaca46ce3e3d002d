"""State off the device and back, as between training and generation: seconds, and memory freed.

Each cycle moves the same roles; from the second on, host buffers are there and page-locked. Memory
is counted by the device's driver, so that what torch's allocator keeps is not called free.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from forebay.engine.state_moves import MOVABLE, HostPages
from forebay.errors import ConfigError
from forebay.tiers.ledger import Role, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.bench.training import Training
    from forebay.engine import Engine

__all__ = ["CHOICES", "measure_states"]

CHOICES: dict[str, tuple[Role, ...]] = {
    "all": MOVABLE,
    "optim_states, hp_params": (Role.OPTIM_STATES, Role.HP_PARAMS),
}
_CYCLES = 4


def measure_states(training: Training) -> Iterator[dict[str, Any]]:
    """Train a step, then move each choice away and back; yields one result for each choice.

    Raises:
        ConfigError: The contestant is not one of forebay's.
    """
    spec, engine = training.spec, training.runner.engine
    if engine is None:
        raise ConfigError(
            f"variant {spec.variant!r} moves no state",
            hint="device, r0 ... r100, host or planned",
        )
    batches = training.batches(spec.micro_batches[0], spec.sequence)
    training.step(batches, 0)
    training.wait()
    del batches
    for choice, roles in CHOICES.items():
        cycles = [_cycle(engine, roles) for _ in range(_CYCLES)]
        yield {
            "variant": spec.variant,
            "choice": choice,
            "cycles": cycles,
            "loss_after": float(training.step(training.batches(1, spec.sequence), 1)[1]),
        }
        training.wait()


def _cycle(engine: Engine, roles: tuple[Role, ...]) -> dict[str, float]:
    engine.synchronize()
    before = _taken(engine)
    begin = time.perf_counter()
    moved = engine.moves.offload(roles, pages=HostPages.LOCKED)
    away = time.perf_counter()
    freed = before - _taken(engine)
    locking = time.perf_counter()
    engine.page_locking.wait()
    locked = time.perf_counter()
    engine.moves.reload()
    back = time.perf_counter()
    return {
        "moved_bytes": moved,
        "freed_bytes": freed,
        "offload_seconds": away - begin,
        "locking_seconds": locked - locking,
        "reload_seconds": back - locked,
    }


def _taken(engine: Engine) -> int:
    """Device bytes in use, by the driver's own count; on a host, by the ledger's."""
    device = engine.accelerator.device
    if device.type != "cuda":
        return engine.ledger.bytes(Tier.DEVICE)
    free, total = torch.cuda.mem_get_info(device)
    return total - free
