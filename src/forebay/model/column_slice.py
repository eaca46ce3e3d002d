"""What is held of a parameter, as columns are counted; and the room that chosen columns take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["ColumnSlice", "compact_offsets"]

# Each parameter's compact columns begin at a multiple of 256 bytes.
_ALIGNMENT_ELEMENTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSlice:
    """Which elements of a parameter are looked at.

    Attributes:
        columns: Columns of the parameter; 0 where it has fewer than two dimensions.
        start: First element in the flat parameter.
        elements: Number of elements.
    """

    columns: int
    start: int
    elements: int

    @classmethod
    def of(cls, shape: Sequence[int], *, start: int, elements: int) -> ColumnSlice:
        """The slice of a parameter of a shape."""
        columns = math.prod(shape[1:]) if len(shape) > 1 else 0
        return cls(columns=columns, start=start, elements=elements)

    def kept(self, share: float) -> int:
        """Columns that a share of them makes: at least one, and all where there are none."""
        return min(self.columns, max(1, int(share * self.columns)))

    def most(self, share: float) -> int:
        """Elements in so many columns of the slice, at most."""
        if not self.columns:
            return self.elements
        rows = self._row(self.start + self.elements - 1) - self._row(self.start) + 1
        return min(self.elements, self.kept(share) * rows) if self.elements else 0

    def _row(self, element: int) -> int:
        return element // self.columns


def compact_offsets(slices: Iterable[ColumnSlice], *, share: float) -> tuple[list[int], int]:
    """Where each slice's chosen columns begin in one flat space, and its elements."""
    offsets, at = [], 0
    for one in slices:
        offsets.append(at)
        at += -(-one.most(share) // _ALIGNMENT_ELEMENTS) * _ALIGNMENT_ELEMENTS
    return offsets, at
