"""Intervals of work in rows: what a simulation predicts and what a run records, in one form.

Pure values; seconds count from any common zero. It neither measures nor draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Interval", "Row", "Timeline", "overlap_seconds", "union"]


class Row(Enum):
    """Where work runs; the order is the one in which pictures show them."""

    COMPUTE = "compute"
    """Forward and backward on the device."""
    DEVICE_UPDATE = "device update"
    """Updates on the device, which share its compute stream."""
    DOWN = "down"
    """The link from device to host."""
    UP = "up"
    """The link from host to device."""
    HOST_UPDATE = "host update"
    """Updates, sums and norms in the pool's threads."""
    RANKS = "between ranks"
    """Collectives."""
    READ = "nvme read"
    """The link from files to host memory."""
    WRITE = "nvme write"
    """The link from host memory to files."""
    WAIT = "wait"
    """The compute stream stands still for something that has not arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One stretch of work.

    Attributes:
        row: Where it ran.
        begin: Seconds.
        end: Seconds, not before `begin`.
        name: What it was, for example "publish layers.3".
        nbytes: Bytes that it moved over a link; 0 elsewhere.
    """

    row: Row
    begin: float
    end: float
    name: str
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Intervals of one or more steps.

    Attributes:
        title: What is shown, for a picture's head.
        intervals: In order of their begin.
    """

    title: str
    intervals: tuple[Interval, ...]

    @property
    def begin(self) -> float:
        """When the first interval begins; 0 when there is none."""
        return min((i.begin for i in self.intervals), default=0.0)

    @property
    def end(self) -> float:
        """When the last one ends; 0 when there is none."""
        return max((i.end for i in self.intervals), default=0.0)

    def in_row(self, row: Row) -> tuple[Interval, ...]:
        """The intervals of one row."""
        return tuple(i for i in self.intervals if i.row is row)

    def busy_seconds(self, row: Row) -> float:
        """Seconds in which a row has at least one interval."""
        return sum(end - begin for begin, end in union(self.in_row(row)))

    def nbytes(self, row: Row) -> int:
        """Bytes of a row."""
        return sum(i.nbytes for i in self.in_row(row))

    def from_zero(self) -> Timeline:
        """The same with its begin at 0."""
        zero = self.begin
        return replace(
            self,
            intervals=tuple(
                replace(i, begin=i.begin - zero, end=i.end - zero) for i in self.intervals
            ),
        )

    @classmethod
    def of(cls, title: str, intervals: Iterable[Interval]) -> Timeline:
        """A timeline with its intervals sorted."""
        return cls(title=title, intervals=tuple(sorted(intervals, key=lambda i: (i.begin, i.end))))


def union(intervals: Iterable[Interval]) -> list[tuple[float, float]]:
    """Disjoint (begin, end) stretches that the intervals cover, in order."""
    stretches: list[tuple[float, float]] = []
    for interval in sorted(intervals, key=lambda i: i.begin):
        if stretches and interval.begin <= stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(stretches[-1][1], interval.end))
        else:
            stretches.append((interval.begin, interval.end))
    return stretches


def overlap_seconds(
    left: Sequence[tuple[float, float]], right: Sequence[tuple[float, float]]
) -> float:
    """Seconds that two lists of disjoint stretches, each in order, have in common."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        begin = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        total += max(0.0, end - begin)
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return total
