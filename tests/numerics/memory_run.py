"""Measures the memory of engines, one after the other, and prints the numbers as JSON.

Run by `test_memory.py` in a process of its own. A small engine is trained and closed first, so that
what torch and Python load at first use is not taken for training state. With `"heap": true` a
block of 24 MiB is freed too, after which glibc takes all smaller blocks from its heap, as in a
process that has run for a while (mallopt(3), M_MMAP_THRESHOLD).

Beside the resident bytes of the process (VmRSS, and VmHWM for the peak) it tells those of
forebay's own mappings by tier and role: found by their names in `/proc/self/smaps` where the
kernel keeps names (CONFIG_ANON_VMA_NAME), else by their addresses.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import forebay
from forebay.tiers.heap import HeapTrimmer
from forebay.tiers.host import HostArena

_PROC = Path("/proc/self")
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def status_bytes(key: str) -> int:
    """VmRSS or VmHWM."""
    found = re.search(rf"^{key}:\s+(\d+) kB", (_PROC / "status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024


def reset_peak() -> None:
    """Let VmHWM begin at VmRSS again (man 5 proc: clear_refs)."""
    (_PROC / "clear_refs").write_text("5")


def resident_bytes() -> tuple[dict[str, int], str]:
    """Resident bytes of forebay's mappings by "tier:role", and how they were found."""
    arenas = {
        arena.address: f"{arena.tier.value}:{arena.role.value}"
        for arena in gc.get_objects()
        if type(arena) is HostArena and not arena.closed
    }
    by_name, by_address = dict.fromkeys(arenas.values(), 0), dict.fromkeys(arenas.values(), 0)
    name = owner = None
    for line in (_PROC / "smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if not head.endswith(":"):
            found = re.search(r"\[anon:forebay:(\w+:\w+)\]", rest)
            name = found.group(1) if found else None
            owner = arenas.get(int(head.partition("-")[0], 16))
        elif head == "Rss:":
            resident = int(rest.split()[0]) * 1024
            if name is not None:
                by_name[name] += resident
            if owner is not None:
                by_address[owner] += resident
    return (by_name, "names") if any(by_name.values()) else (by_address, "addresses")


def build(dtype: torch.dtype, *, width: int, depth: int) -> nn.Module:
    """A wide stack: nearly all of its memory is weights, its activations are a few rows."""
    torch.set_default_dtype(dtype)
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())]
    torch.set_default_dtype(torch.float32)
    return nn.Sequential(*layers)


def engine_for(model: nn.Module, case: dict):
    """`forebay.initialize` with a dict."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case["micro"],
        "gradient_clipping": 1.0,
        "bf16": {"enabled": "bfloat16" in (case["dtype"], case.get("cast_to"))},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": case["offload"]}},
        "forebay": {"host_budget": case.get("host_budget")},
    }
    if case["offload"] == "nvme":
        config["zero_optimization"]["offload_optimizer"]["nvme_path"] = tempfile.gettempdir()
    if case.get("parameters") == "nvme":
        config["zero_optimization"] |= {
            "stage": 3,
            "stage3_max_live_parameters": 1,
            "offload_param": {"device": "nvme", "max_in_cpu": 0},
        }
    return forebay.initialize(model=model, config=config)[0]


def update(engine, case: dict) -> None:
    """One window and its update."""
    for _ in range(case["micro"]):
        x = torch.randn(2, case["width"]).to(next(engine.module.parameters()).dtype)
        engine.backward(engine(x).float().pow(2).mean())
        engine.step()


def engine_life(case: dict) -> None:
    """Build, train two steps, close."""
    model = build(_DTYPES[case["dtype"]], width=case["width"], depth=case["depth"])
    engine = engine_for(model, case)
    for _ in range(2):
        update(engine, case)
    engine.close()


def measure(case: dict) -> dict:
    """Train one model and note the memory on the way."""
    engine_life({**case, "width": 64, "depth": 2})
    if case.get("heap"):
        torch.empty(24 << 20, dtype=torch.uint8)
    model = build(_DTYPES[case["dtype"]], width=case["width"], depth=case["depth"])
    gc.collect()
    model_bytes = sum(p.nbytes for p in model.parameters())
    numbers = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "model": model_bytes,
        "before": status_bytes("VmRSS"),
    }
    reset_peak()
    engine = engine_for(model, case)
    numbers["start"] = status_bytes("VmRSS")
    numbers["start_peak"] = status_bytes("VmHWM")
    reset_peak()
    numbers["resident"] = []
    for _ in range(case["steps"]):
        update(engine, case)
        engine.synchronize()
        numbers["resident"].append(status_bytes("VmRSS"))
    numbers["peak"] = status_bytes("VmHWM")
    HeapTrimmer(every_bytes=0).trim()
    numbers["in_use"] = status_bytes("VmRSS")
    numbers["ledger"] = {f"{r.tier.value}:{r.role.value}": r.nbytes for r in engine.ledger.table()}
    numbers["mapped"], numbers["found_by"] = resident_bytes()
    engine.ledger.check()
    engine.close()
    return numbers


def lives(case: dict) -> dict:
    """Resident bytes after each of several engines was built, trained and closed."""
    resident = []
    for _ in range(case["lives"]):
        engine_life(case)
        gc.collect()
        resident.append(status_bytes("VmRSS"))
    return {"resident": resident}


if __name__ == "__main__":
    torch.manual_seed(0)
    cases = json.loads(sys.argv[1])
    json.dump([lives(case) if "lives" in case else measure(case) for case in cases], sys.stdout)
