"""What ranks reach between each other: an all-gather of large blocks, and of almost nothing.

Every rank of a run under torchrun calls `measure_ranks`; all find the same figures.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING

import torch
from torch import distributed

from forebay.hardware.profile import Network

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["is_rank", "join_ranks", "measure_ranks"]

# Of each rank: wide enough for a link's full rate.
_BLOCK_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}
_REPEATS = 5


def is_rank() -> bool:
    """Whether torchrun started this process with others."""
    count = os.environ.get("WORLD_SIZE", "")
    return count.isdigit() and int(count) > 1


def join_ranks(device: torch.device) -> int:
    """Meet the other ranks; returns this one's number.

    Args:
        device: Where the ranks compute: NCCL between GPUs, else gloo.
    """
    if not distributed.is_initialized():
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return distributed.get_rank()


def measure_ranks(device: torch.device) -> Network:
    """Measure between this rank and the others.

    Args:
        device: Where the blocks lie.
    """
    size, local = distributed.get_world_size(), _local_size()
    block = torch.zeros(_BLOCK_BYTES[device.type], dtype=torch.uint8, device=device)
    small = torch.zeros(8, dtype=torch.uint8, device=device)
    whole = _seconds(block, size)
    latency = _seconds(small, size)
    rate = (size - 1) * block.nbytes / whole
    if size == local:
        return Network(inside=rate, latency_seconds=latency)
    # With several nodes the network between them is what a ring waits for: each node takes in what
    # the others hold.
    across = (size - local) * block.nbytes / whole
    node = distributed.new_subgroups(local)[0] if local > 1 else None
    if node is None:
        return Network(inside=rate, across=across, latency_seconds=latency)
    inside = (local - 1) * block.nbytes / _seconds(block, local, group=node)
    return Network(inside=inside, across=across, latency_seconds=latency)


def _local_size() -> int:
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(said) if said.isdigit() else distributed.get_world_size()


def _seconds(
    block: torch.Tensor, size: int, *, group: distributed.ProcessGroup | None = None
) -> float:
    """Seconds of an all-gather: the median over repeats of the slowest rank's."""
    parts = [torch.empty_like(block) for _ in range(size)]

    def work() -> None:
        distributed.all_gather(parts, block, group=group)

    work()
    runs = sorted(_timed(work, block.device) for _ in range(_REPEATS))
    slowest = torch.tensor([statistics.median(runs)], dtype=torch.float64, device=block.device)
    distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX, group=group)
    return max(float(slowest), 1e-9)


def _timed(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
