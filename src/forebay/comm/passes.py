"""The handshake at the beginning of every pass: all ranks say what they are about to do.

Two ranks that do different things would wait for each other in different collectives, for ever.

[Note: rounds] In stage 3 ranks may need units in different orders: experts that are chosen by data,
an evaluation on one rank. So whoever meets the others, for whatever, first takes part in gathering
the units that some of them need: a round. A rank that needed one of them goes on, the others say
again what they are about to do. A rank waits for its unit until the others have come to their next
meeting, and for ever only where they come to none.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from forebay.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    EXCHANGE = 5
    """Any other collective, where ranks may gather units in orders of their own."""

    @property
    def words(self) -> str:
        """For messages."""
        return {
            PassKind.FORWARD: "a forward",
            PassKind.BACKWARD: "a backward inside a window",
            PassKind.LAST_BACKWARD: "a window's last backward",
            PassKind.STEP: "a step",
            PassKind.GATHER: "a gathering of weights",
            PassKind.EXCHANGE: "an exchange",
        }[self]


_COUNTED = {
    PassKind.FORWARD: "forward",
    PassKind.BACKWARD: "backward",
    PassKind.LAST_BACKWARD: "backward",
    PassKind.STEP: "step",
    PassKind.EXCHANGE: "exchange",
}


class Passes:
    """Counts this rank's passes and compares each with the others'.

    Args:
        group: The ranks.
        width: Numbers that a rank may tell with a pass.

    Attributes:
        serve: Gathers a unit together with the other ranks: `serve(unit, keeps=..., is_even=...)`
            says whether this one needs it, and whether all do.
        uneven: Gathers so far that some ranks needed when others did not.
        was_uneven: Whether there were such in the window before.
    """

    def __init__(self, group: Group, *, width: int) -> None:
        self._group = group
        self._width = width
        self._counts = dict.fromkeys(_COUNTED.values(), 0)
        self.serve: Callable[..., None] = _serve_nobody
        self.uneven = 0
        self.was_uneven = False
        self._uneven_before = 0

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
        what = f"{kind.words} (number {number})"
        rows = self._tell(this, values, what)
        while self._serve_all(rows, own=None):
            rows = self._tell(this, values, what)
        for rank, row in enumerate(rows):
            other = PassKind(int(row[0])), int(row[1])
            if other != this:
                raise RankError(
                    f"rank {rank} begins {other[0].words} (number {other[1]}) while rank "
                    f"{self._group.rank} begins {what}",
                    hint="every rank makes the same number of passes of the same kind; give all "
                    "of them equally many batches",
                )
        if kind is PassKind.STEP:
            self.was_uneven = self.uneven > self._uneven_before
            self._uneven_before = self.uneven
        return [row[2 : 2 + len(values)] for row in rows]

    def gather(self, unit: int, *, name: str) -> None:
        """Have a unit gathered, with whatever other units other ranks need now; see `meet`."""
        self._serve_all(self._tell((PassKind.GATHER, unit), (), f"a gathering of {name}"), own=unit)

    def _tell(
        self, this: tuple[PassKind, int], values: Sequence[float], what: str
    ) -> list[list[float]]:
        padding = [0.0] * (self._width - len(values))
        numbers = [float(this[0]), float(this[1]), *values, *padding]
        told = self._group.tell(torch.tensor(numbers, dtype=torch.float64), what=what)
        rows: list[list[float]] = told.tolist()
        return rows

    def _serve_all(self, rows: Sequence[Sequence[float]], *, own: int | None) -> bool:
        """Gather every unit that a rank needs, in the order of ranks; False where none does."""
        needed = [int(row[1]) if row[0] == PassKind.GATHER else None for row in rows]
        units = dict.fromkeys(unit for unit in needed if unit is not None)
        for unit in units:
            is_even = all(one == unit for one in needed)
            self.uneven += not is_even
            self.serve(unit, keeps=unit == own, is_even=is_even)
        return bool(units)


def _serve_nobody(unit: int, **_how: bool) -> None:
    raise AssertionError(f"unit {unit} is gathered by nobody")
