"""Neighbouring units of a deep model taken for one, so that a simulation takes its time.

A finer grain changes a step by the time of one unit. For seconds alone; bytes are those of the
units as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from forebay.model.spec import ModelSpec, UnitSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Merged"]

_T = TypeVar("_T")
_N = TypeVar("_N", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Which units are one: all but the first and the last, so many together.

    Attributes:
        units: How many there are.
        together: Of those between, how many are one; the last one may have fewer.
    """

    units: int
    together: int

    @classmethod
    def at_most(cls, most: int, *, units: int) -> Merged:
        """As few together as leaves at most so many between the first and the last."""
        return cls(units=units, together=max(1, -(-(units - 2) // most)))

    def groups(self) -> list[range]:
        """The units of each, in order.

        Example:
            >>> [list(group) for group in Merged(units=7, together=2).groups()]
            [[0], [1, 2], [3, 4], [5], [6]]
        """
        last = self.units - 1
        between = (
            range(first, min(first + self.together, last))
            for first in range(1, last, self.together)
        )
        ends = [range(1), range(last, self.units)] if last else [range(1)]
        return [ends[0], *between, *ends[1:]]

    def sums(self, values: Sequence[_N]) -> tuple[_N, ...]:
        """What units take, together."""
        return tuple(sum(values[i] for i in group) for group in self.groups())

    def first_of(self, values: Sequence[_T]) -> list[_T]:
        """What the first of each has."""
        return [values[group[0]] for group in self.groups()]

    def spread(self, values: Sequence[_T]) -> list[_T]:
        """What each is given, for all of its units."""
        pairs = zip(values, self.groups(), strict=True)
        return [value for value, group in pairs for _ in group]

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """The model with these units."""
        return ModelSpec(
            units=tuple(
                UnitSpec(
                    name=spec.units[group[0]].name,
                    params=tuple(param for i in group for param in spec.units[i].params),
                )
                for group in self.groups()
            )
        )
