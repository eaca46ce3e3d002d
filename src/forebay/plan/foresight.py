"""The order in which passes use units: recorded, and expected to come again. A hint, never a need.

A pass is one root forward or one backward. What is expected is what the last pass of the same
kind did; before the first one, module order, and its reverse for a backward.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Foresight", "Pass"]


class Pass(Enum):
    """What kind of pass runs."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Foresight:
    """Records uses and tells the ones to come.

    Args:
        count: Number of units; `0 .. count - 1` is the first forward's expected order.

    Attributes:
        kind: The pass that runs, or ran last; None before the first.
    """

    def __init__(self, count: int) -> None:
        self._orders: dict[Pass, tuple[int, ...]] = {Pass.FORWARD: tuple(range(count))}
        self.kind: Pass | None = None
        self._used: list[int] = []
        self._expected: tuple[int, ...] = self._orders[Pass.FORWARD]
        self._at = 0
        self._then: Pass | None = None

    def order(self, kind: Pass) -> tuple[int, ...]:
        """The uses that a pass of this kind is expected to make, in order."""
        found = self._orders.get(kind)
        return tuple(reversed(self._orders[Pass.FORWARD])) if found is None else found

    @property
    def recorded(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """What the last forward used and what the last backward; None before there was one."""
        if Pass.BACKWARD not in self._orders:
            return None
        return self._orders[Pass.FORWARD], self._orders[Pass.BACKWARD]

    def begin(self, kind: Pass, *, then: Pass | None) -> None:
        """A pass begins.

        Args:
            kind: Its kind.
            then: The pass that is expected after it; None when weights change first.
        """
        self.end()
        self.kind, self._then = kind, then
        self._used = []
        self._expected = self.order(kind)
        self._at = 0

    def expect(self, kind: Pass) -> None:
        """The running pass is over, and one of this kind comes next."""
        self.end()
        self._at = len(self._expected)
        self._then = kind

    def end(self) -> None:
        """Remember what the running pass did."""
        if self.kind is not None and self._used:
            self._orders[self.kind] = tuple(self._used)

    def use(self, unit: int) -> None:
        """A unit is used; a run of uses of the same unit counts once."""
        if self._used and self._used[-1] == unit:
            return
        self._used.append(unit)
        try:
            self._at = self._expected.index(unit, self._at) + 1
        except ValueError:
            return  # not expected here: the expectation stays where it is

    def upcoming(self) -> Iterator[int]:
        """Units in the order of the uses to come: this pass, then the next one."""
        yield from self._expected[self._at :]
        if self._then is not None:
            yield from self.order(self._then)

    def distances(self) -> dict[int, int]:
        """For each unit that is to come, how many uses lie before its next one."""
        found: dict[int, int] = {}
        for distance, unit in enumerate(self.upcoming()):
            found.setdefault(unit, distance)
        return found
