"""The handshake at the beginning of every pass: all ranks say what they are about to do.

Two ranks that do different things would wait for each other in different collectives, for ever.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from forebay.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.comm.group import Group

__all__ = ["PassKind", "Passes"]


class PassKind(IntEnum):
    """What a rank is about to do."""

    FORWARD = 0
    """A forward of the root module."""
    BACKWARD = 1
    """A backward that is not the window's last."""
    LAST_BACKWARD = 2
    """The window's last backward."""
    STEP = 3
    """An update."""
    GATHER = 4
    """The gathering of a unit's weights."""

    @property
    def words(self) -> str:
        """For messages."""
        return {
            PassKind.FORWARD: "a forward",
            PassKind.BACKWARD: "a backward inside a window",
            PassKind.LAST_BACKWARD: "a window's last backward",
            PassKind.STEP: "a step",
            PassKind.GATHER: "a gathering of weights",
        }[self]


_COUNTED = {
    PassKind.FORWARD: "forward",
    PassKind.BACKWARD: "backward",
    PassKind.LAST_BACKWARD: "backward",
    PassKind.STEP: "step",
    PassKind.GATHER: "gathering",
}


class Passes:
    """Counts this rank's passes and compares each with the others'.

    Args:
        group: The ranks.
        width: Numbers that a rank may tell with a pass.
    """

    def __init__(self, group: Group, *, width: int) -> None:
        self._group = group
        self._width = width
        self._counts = dict.fromkeys(_COUNTED.values(), 0)

    def begin(self, kind: PassKind) -> tuple[PassKind, int]:
        """Count a pass; call it in the order of the program."""
        name = _COUNTED[kind]
        self._counts[name] += 1
        return kind, self._counts[name]

    def meet(self, this: tuple[PassKind, int], values: Sequence[float] = ()) -> list[list[float]]:
        """Wait until every rank begins the same pass; call it from the queue.

        Args:
            this: From `begin`.
            values: At most `width` numbers for the others.

        Returns:
            Every rank's numbers, by rank.

        Raises:
            RankError: A rank is about to do something else, does not come, or is gone.
        """
        kind, number = this
        padding = [0.0] * (self._width - len(values))
        what = f"{kind.words} (number {number})"
        numbers = [float(kind), float(number), *values, *padding]
        rows = self._group.tell(torch.tensor(numbers, dtype=torch.float64), what=what).tolist()
        for rank, row in enumerate(rows):
            other = PassKind(int(row[0])), int(row[1])
            if other != this:
                raise RankError(
                    f"rank {rank} begins {other[0].words} (number {other[1]}) while rank "
                    f"{self._group.rank} begins {what}",
                    hint="every rank makes the same number of passes of the same kind; give all "
                    "of them equally many batches",
                )
        return [row[2 : 2 + len(values)] for row in rows]

    def meet_in_unit(self, this: tuple[PassKind, int], unit: float, *, name: str) -> None:
        """`meet`, where all ranks must mean the same unit.

        Raises:
            RankError: See `meet`; or a rank needs another unit now.
        """
        for rank, row in enumerate(self.meet(this, [unit])):
            if row[0] != unit:
                raise RankError(
                    f"rank {rank} needs the weights of unit {int(row[0])} while rank "
                    f"{self._group.rank} needs those of unit {int(unit)} ({name})",
                    hint="stage 3 needs units in one order on all ranks: put modules that choose "
                    "by data into one unit with forebay.utils.set_z3_leaf_modules",
                )
