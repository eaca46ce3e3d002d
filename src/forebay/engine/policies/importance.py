"""What this window's gradients say: which columns are important, and what these get.

Gradients are looked at on the device as they leave it. Nothing is decided by that: a step that is
skipped, or a window that is discarded, leaves no trace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from forebay.engine.policies.important import slice_of
from forebay.links.lanes import wait
from forebay.model.column_slice import ColumnSlice
from forebay.optim.clip import ordered_sum
from forebay.optim.columns import Columns, column_squares, largest_columns
from forebay.optim.readback import read_numbers
from forebay.optim.squares import square_sum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.engine.record import ParamRecord
    from forebay.engine.watched_gradients import WatchedGradients
    from forebay.links.lanes import Lanes
    from forebay.plan.zenflow import ZenFlow

__all__ = ["Importance", "Look", "tell_sharers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was seen of one gradient.

    Attributes:
        columns: The important columns, chosen by it or before.
        is_choice: Whether they were chosen by it.
        compact: Their elements of it, on the device.
        squares: float64 sums of squares [2]: of all of it, and of `compact`; None where nobody
            asks.
    """

    columns: Columns
    is_choice: bool
    compact: torch.Tensor
    squares: torch.Tensor | None


class Importance:
    """Looks at gradients.

    Args:
        settings: The share of columns, and whether gradients decide when the rest is updated.
        columns_of: The columns chosen so far.
        is_wanted: Whether a parameter's columns are to be chosen by its next gradient.
        device: Where important columns are updated.
    """

    def __init__(
        self,
        settings: ZenFlow,
        *,
        columns_of: Callable[[ParamRecord], Columns | None],
        is_wanted: Callable[[ParamRecord], bool],
        device: torch.device,
    ) -> None:
        self._settings = settings
        self._columns_of = columns_of
        self._is_wanted = is_wanted
        self._device = device
        self._looks: dict[int, Look] = {}
        self.is_active = False

    def look(self, record: ParamRecord, value: torch.Tensor) -> None:
        """A final gradient: what this rank has of it, on the device."""
        if not self.is_active or not record.segment.elements:
            return
        flat = value.detach().reshape(-1)
        columns = self._columns_of(record)
        is_choice = columns is None or self._is_wanted(record)
        if columns is None or is_choice:
            columns = self._choose(record, flat)
        compact = columns.pick(flat)
        squares = None
        if self._settings.update_every is None:
            squares = torch.stack([square_sum(flat), square_sum(compact)])
        self._looks[record.index] = Look(
            columns=columns, is_choice=is_choice, compact=compact, squares=squares
        )

    def _choose(self, record: ParamRecord, flat: torch.Tensor) -> Columns:
        where = slice_of(record)
        if not where.columns:
            return Columns(where, None)
        squares = column_squares(flat, where)
        return Columns(where, largest_columns(squares, where.kept(self._settings.topk_ratio)))

    def seen(self, record: ParamRecord, gradients: WatchedGradients) -> Look:
        """The look at a parameter's final gradient, taken again if more came after it had left."""
        if record.index not in self._looks or gradients.has_grown(record):
            part = record.part
            if part.ticket is not None:
                wait(part.ticket, f"the way of the gradient of {record.label} to the host")
            self.look(record, part.gradient(record.slot).clone().to(self._device))
        look = self._looks[record.index]
        if look.compact.is_cuda:
            # it may have been made on the stream of sums over ranks
            look.compact.record_stream(torch.cuda.current_stream(look.compact.device))
        return look

    def forget(self) -> None:
        """The window is over."""
        self._looks.clear()

    def norms(
        self, records: Sequence[ParamRecord], *, tell: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[int, tuple[float, float]]:
        """Root mean squares over columns, by parameter: of the rest, and of the important ones.

        Of parameters that have both, on any rank.

        Args:
            records: The same on every rank, in the same order.
            tell: Makes [sharers, n] of every rank's float64 [n].
        """
        rows = tell(self._squares(records).view(-1))
        rows = rows.view(len(rows), len(records), 3)
        found = {}
        for place, record in enumerate(records):
            total, important = (ordered_sum(rows[:, place, n].tolist()) for n in range(2))
            if not rows[:, place, 2].any():
                continue
            slot = record.slot
            where = ColumnSlice.of(slot.shape, start=0, elements=slot.elements)
            kept = where.kept(self._settings.topk_ratio)
            # rounding may leave the smaller part of a sum below zero
            rest = math.sqrt(max(0.0, total - important) / (where.columns - kept))
            found[record.index] = (rest, math.sqrt(important / kept))
        return found

    def _squares(self, records: Sequence[ParamRecord]) -> torch.Tensor:
        """float64 [records, 3]: sums of squares of this rank's slice, and whether it has a rest."""
        found = torch.zeros(len(records), 3, dtype=torch.float64)
        held = [n for n, record in enumerate(records) if record.segment.elements]
        looks = [self._looks[records[n].index] for n in held]
        if looks:
            squares = torch.cat([look.squares for look in looks if look.squares is not None])
            found[held, :2] = torch.tensor(read_numbers(squares), dtype=torch.float64).view(-1, 2)
            has_rest = [float(not look.columns.are_all) for look in looks]
            found[held, 2] = torch.tensor(has_rest, dtype=torch.float64)
        return found


def tell_sharers(lanes: Lanes, own: torch.Tensor) -> torch.Tensor:
    """What every rank says that holds another slice of the same parameters: [sharers, n]."""
    if lanes.ranks is None:
        return own[None]
    rows = lanes.ranks.tell(own, what="norms of columns")
    return rows[list(lanes.ranks.collectives.group.sharers)]
