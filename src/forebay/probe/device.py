"""What the device computes: matrix products by size, copies in its memory, the cost of a launch.

On `cpu` the device is the processor, with as many threads as torch uses.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forebay.hardware.profile import MatrixRate

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.accelerators.base import Accelerator

__all__ = ["device_copy", "launch_seconds", "matrix_rates"]

# From the width of a toy's layers to that of a large model's; a processor's rate settles early.
_SIZES = {"cuda": (512, 1024, 2048, 4096, 8192), "cpu": (64, 128, 256, 512, 1024)}
_DTYPES = {"cuda": ("bfloat16", "float16", "float32"), "cpu": ("float32", "bfloat16")}
# Boost clocks and thread pools have settled by then.
_SECONDS = {"cuda": 0.4, "cpu": 0.15}


def matrix_rates(accelerator: Accelerator) -> tuple[MatrixRate, ...]:
    """Rates of square products."""
    device = accelerator.device
    found = []
    for dtype in _DTYPES[device.type]:
        for size in _SIZES[device.type]:
            left, right = (
                torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2)
            )
            seconds = _seconds(partial(torch.mm, left, right), accelerator)
            found.append(MatrixRate(dtype=dtype, size=size, flops=2 * size**3 / seconds))
    return tuple(found)


def device_copy(accelerator: Accelerator) -> float:
    """Bytes per second, read plus written, of a copy far larger than caches."""
    nbytes = 1 << 30 if accelerator.device.type == "cuda" else 1 << 27
    source = torch.zeros(nbytes, dtype=torch.uint8, device=accelerator.device)
    target = torch.empty_like(source)
    return 2 * nbytes / _seconds(lambda: target.copy_(source), accelerator)


def launch_seconds(accelerator: Accelerator) -> float:
    """Seconds of an operation on almost nothing."""
    value = torch.zeros(8, device=accelerator.device)
    return _seconds(lambda: value.add_(1.0), accelerator)


def _seconds(work: Callable[[], Any], accelerator: Accelerator) -> float:
    """Seconds of one run: the median of batches of runs."""
    work()
    accelerator.synchronize()
    begin = time.perf_counter()
    work()
    accelerator.synchronize()
    once = max(time.perf_counter() - begin, 1e-7)
    total = _SECONDS[accelerator.device.type]
    runs = max(1, min(1000, int(total / 8 / once)))
    batches: list[float] = []
    end = time.perf_counter() + total
    while time.perf_counter() < end or len(batches) < 3:
        begin = time.perf_counter()
        for _ in range(runs):
            work()
        accelerator.synchronize()
        batches.append((time.perf_counter() - begin) / runs)
    return statistics.median(batches)
