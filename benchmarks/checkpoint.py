"""How fast checkpoints are written and loaded, beside what the disk itself takes.

    PYTHONPATH=src python benchmarks/checkpoint.py --folder /tmp/bench --millions 64 --rounds 5

Each round, in turn: the disk's own write bandwidth (a file of the checkpoint's size, in writes of
16 MiB from memory, then fsync, by four threads as the writer has), a save at once, and a save
beside training with its stall. Medians and spread go to stdout, raw numbers to --output.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

import forebay

_BLOCK = 16 << 20


def disk_seconds(folder: Path, nbytes: int) -> float:
    """Seconds for so many bytes, written and durable."""
    path = folder / "bandwidth"
    block = memoryview(os.urandom(_BLOCK))
    began = time.monotonic()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def write(at: int) -> None:
        size = min(_BLOCK, nbytes - at)
        os.pwrite(file, block[:size], at)
        os.posix_fadvise(file, at, size, os.POSIX_FADV_DONTNEED)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(0, nbytes, _BLOCK)))
    os.fsync(file)
    os.close(file)
    seconds = time.monotonic() - began
    path.unlink()
    return seconds


def engine_of(millions: int, *, beside: bool, stage: int, device: str):
    """A model of blocks of 4 million parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(millions // 4)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": device}},
        "checkpoint": {"writer": {"decoupled": beside}},
    }
    engine, *_ = forebay.initialize(model=model, config=config)
    return engine


def step(engine, rows: int) -> float:
    """One update; returns its seconds."""
    began = time.monotonic()
    x = torch.ones(rows, 2048, dtype=torch.bfloat16, device=engine.device)
    engine.backward(engine(x).float().square().mean())
    engine.step()
    engine.synchronize()
    return time.monotonic() - began


def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    """All rounds."""
    folder = options.folder / "checkpoints"
    engines = {
        beside: engine_of(options.millions, beside=beside, stage=2, device=options.offload)
        for beside in (False, True)
    }
    rounds = []
    for number in range(options.rounds + 1):
        found: dict[str, float] = {}
        for beside, engine in engines.items():
            step(engine, options.rows)
            found["step_seconds"] = step(engine, options.rows)
            engine.save_checkpoint(folder, "same")
            while beside and engine.checkpoints.is_writing:
                step(engine, options.rows)
            engine.wait_for_checkpoint()
            last = engine.checkpoints.last
            name = "beside" if beside else "at_once"
            found[f"{name}_seconds"] = last.seconds
            found[f"{name}_stall_seconds"] = last.stall_seconds
            found["bytes"] = last.nbytes
        found["disk_seconds"] = disk_seconds(options.folder, int(found["bytes"]))
        began = time.monotonic()
        engines[False].load_checkpoint(folder)
        found["load_seconds"] = time.monotonic() - began
        if number:  # the first is warm-up
            rounds.append(found)
    for engine in engines.values():
        engine.close()
    shutil.rmtree(folder)
    return rounds


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--millions", type=int, default=64, help="parameters; 12 bytes each")
    parser.add_argument("--rows", type=int, default=64, help="of a forward")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--offload", default="cpu", help="none or cpu")
    parser.add_argument("--output", type=Path, help="folder for raw numbers")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rounds = measure(options)
    for name in rounds[0]:
        values = sorted(found[name] for found in rounds)
        print(f"{name:24} {statistics.median(values):14.3f}  ({values[0]:.3f} - {values[-1]:.3f})")
    ratios = [found["disk_seconds"] / found["at_once_seconds"] for found in rounds]
    stalls = [found["beside_stall_seconds"] / found["at_once_seconds"] for found in rounds]
    print(f"{'of the bandwidth':24} {statistics.median(ratios):14.3f}")
    print(f"{'stall of a save':24} {statistics.median(stalls):14.3f}")
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        name = f"checkpoint-{platform.node()}-torch{torch.__version__}-{options.offload}.json"
        (options.output / name).write_text(json.dumps(rounds, indent=2) + "\n")


if __name__ == "__main__":
    main()
