"""Seconds of one run of something on the device: medians of batches."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.accelerators.base import Accelerator

__all__ = ["seconds_of"]

# Boost clocks and thread pools have settled by then.
_SECONDS = {"cuda": 0.4, "cpu": 0.15}
# Batches in those seconds: short ones where something else runs between them.
_BATCHES, _SHORT_BATCHES = 8, 80


def seconds_of(
    work: Callable[[], Any],
    accelerator: Accelerator,
    *,
    between: Callable[[], Any] | None = None,
) -> float:
    """Seconds of one run: the median of batches of runs.

    Args:
        work: Run again and again.
        accelerator: The device that it runs on.
        between: Runs after each batch, and is not counted.
    """
    work()
    accelerator.synchronize()
    begin = time.perf_counter()
    work()
    accelerator.synchronize()
    once = max(time.perf_counter() - begin, 1e-7)
    total = _SECONDS[accelerator.device.type]
    count = _BATCHES if between is None else _SHORT_BATCHES
    runs = max(1, min(1000, int(total / count / once)))
    batches: list[float] = []
    end = time.perf_counter() + total
    while time.perf_counter() < end or len(batches) < 3:
        begin = time.perf_counter()
        for _ in range(runs):
            work()
        accelerator.synchronize()
        batches.append((time.perf_counter() - begin) / runs)
        if between is not None:
            between()
            accelerator.synchronize()
    return statistics.median(batches)
