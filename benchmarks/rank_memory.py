"""Memory of a rank by ZeRO stage and number of ranks: the ledger, the process and the formulas.

    python benchmarks/rank_memory.py --ranks 1,2,4 --output benchmarks/results

Over gloo on processor cores, where the device tier is memory of the process too: its resident set
shows everything, beyond what a first small run has loaded. All figures are bytes per parameter, for
bf16 weights; the formulas are those of the ZeRO papers: 16 bytes of state, of which 2 are weights
and 2 gradients.

glibc keeps freed blocks of up to 32 MiB once the process has freed such, and finds no use for most
of them again, since torch asks for aligned ones. Here it gives back what takes a MiB or more
(MALLOC_MMAP_THRESHOLD_); `--keep-freed` leaves it as it is.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torchrun
from torch import distributed, nn

import forebay

WIDTH, LAYERS = 1024, 96
CASES = [(stage, place) for stage in (1, 2, 3) for place in ("none", "cpu")] + [(3, "params")]


def resident_bytes() -> int:
    """Of this process's own memory."""
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024


class Peak:
    """The largest resident set while a `with` block runs, looked at every 10 ms."""

    def __enter__(self) -> Peak:
        self.nbytes, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.nbytes = max(self.nbytes, resident_bytes())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def at_rest() -> int:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    time.sleep(0.1)
    return resident_bytes()


def build(layers: int) -> nn.Module:
    """Without random numbers, which take longer than all the rest."""
    model = nn.Sequential()
    for _ in range(layers):
        layer = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        nn.init.constant_(layer.weight, 1 / WIDTH)
        model.append(layer)
    return model


def measure(stage: int, place: str, rank: int, layers: int = LAYERS) -> dict[str, Any]:
    before = at_rest()
    torch.manual_seed(0)
    model = build(layers)
    zero: dict[str, Any] = {"stage": stage}
    if place != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if place == "params":
        zero["offload_param"] = {"device": "cpu"}
    if stage == 3:
        zero["stage3_max_live_parameters"] = 2 * WIDTH * WIDTH
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        "forebay": {"rank_timeout": 120},
    }
    engine = forebay.initialize(model=model, config=config)[0]
    with Peak() as peak:
        for _ in range(2):
            engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().sum())
            engine.step()
        engine.synchronize()
    rest = at_rest() - before
    sums: dict[str, int] = {}
    for row in engine.ledger.table():
        sums[row.tier.value] = sums.get(row.tier.value, 0) + row.nbytes
        if row.role.value == "staging":
            sums["room"] = sums.get("room", 0) + row.nbytes
    count = WIDTH * WIDTH * layers
    engine.close()
    found = {**sums, "rest": rest, "peak": peak.nbytes - before}
    return {
        "rank": rank,
        "stage": stage,
        "place": place,
        **{key: value / count for key, value in found.items()},
    }


def work(folder: str) -> None:
    rank = int(os.environ["RANK"])
    measure(3, "params", rank, 4)  # loads what it needs
    found = [measure(stage, place, rank) for stage, place in CASES]
    torchrun.leave(folder, rank, found)
    if distributed.is_initialized():
        distributed.barrier()
    os._exit(0)


def formula(stage: int, count: int) -> float:
    """Bytes per parameter of all state, device and host together; the ZeRO papers."""
    return {1: 4 + 12 / count, 2: 2 + 14 / count, 3: 16 / count}[stage]


def table(results: dict[int, list[list[dict[str, Any]]]]) -> str:
    heads = (
        "ranks, stage, offload, formula, ledger device, ledger host, of which room, RSS, RSS peak"
    )
    lines = ["| " + heads.replace(", ", " | ") + " |", "|---" * 9 + "|"]
    for count, by_rank in results.items():
        for number, (stage, place) in enumerate(CASES):
            of = [found[number] for found in by_rank]
            cells = [
                f"{max(one.get(key, 0) for one in of):.2f}"
                for key in ("device", "host", "room", "rest", "peak")
            ]
            lines.append(
                f"| {count} | {stage} | {place} | {formula(stage, count):.2f} | "
                + " | ".join(cells)
                + " |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--keep-freed", action="store_true", help="glibc as it is by itself")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    variables = torchrun.environment()
    if not options.keep_freed:
        variables["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    results = {}
    for count in map(int, options.ranks.split(",")):
        results[count] = torchrun.run(__file__, ranks=count, timeout=1200, variables=variables)
    text = table(results)
    print(text)
    if options.output is not None:
        head = f"`python {' '.join(sys.argv)}`: bytes per parameter of the fullest rank, "
        head += f"{LAYERS} layers of {WIDTH}x{WIDTH} in bf16, torch {torch.__version__}.\n\n"
        (options.output / "rank-memory-cpu.md").write_text(head + text + "\n")
        (options.output / "rank-memory-cpu.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
