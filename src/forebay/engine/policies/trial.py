"""Whether a way of working that changes no bit makes steps shorter: both are tried, and timed."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Trial"]

# Steps before the first trial: buffers are touched and page-locked for the first time in them.
_WARM_UP = 4
# Steps of each way: the first ones still feel the other.
_SETTLING, _TIMED = 2, 5
# Steps between two trials: batches may have become larger or smaller.
_BETWEEN = 1000


class Trial:
    """Times steps in turn with and without, and stays with what is faster.

    Args:
        clock: Seconds.

    Attributes:
        uses: Whether the step that begins now is one with.
        seconds: Median of a step, with (True) and without (False), of the last trial.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._plan: list[bool] = [True] * _WARM_UP
        self._rest = 0
        self._last: float | None = None
        self.seconds: dict[bool, float] = {}
        self._begin()

    def _begin(self) -> None:
        self._plan += [True] * (_SETTLING + _TIMED) + [False] * (_SETTLING + _TIMED)
        self._found: dict[bool, list[float]] = {True: [], False: []}
        self.uses = self._plan[0]

    def interrupt(self) -> None:
        """The step that ends was neither: a trial that runs begins again."""
        self._last = None
        if self._plan:
            self._plan.clear()
            self._begin()

    def step(self) -> bool:
        """A step has ended; returns whether a trial has, which sets `uses` and `seconds`."""
        now = self._clock()
        last, self._last = self._last, now
        if not self._plan:
            self._rest -= 1
            if not self._rest:
                self._begin()
            return False
        way = self._plan.pop(0)
        if last is not None:
            self._found[way].append(now - last)
        if self._plan:
            self.uses = self._plan[0]
            return False
        self.seconds = {k: statistics.median(v[-_TIMED:]) for k, v in self._found.items()}
        self.uses = self.seconds[True] < self.seconds[False]
        self._rest = _BETWEEN
        return True
