"""The important columns of one part: their state on the device, in compact form.

One set of moments: while a parameter's columns are *here*, their master and moments in the part's
own state are old, and nobody may read those; `send_home` writes them back, with every bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay.model.column_slice import ColumnSlice, compact_offsets
from forebay.optim.columns import Columns
from forebay.optim.flat_state import FlatState
from forebay.optim.master import join, split
from forebay.optim.reference import round_to
from forebay.tiers.device import DeviceArena
from forebay.tiers.ledger import Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from forebay.engine.part import PartStorage
    from forebay.engine.record import ParamRecord
    from forebay.engine.state_memory import PartMemory
    from forebay.engine.terms import UpdateOrder
    from forebay.optim.device_math import DeviceMath
    from forebay.plan.zenflow import ZenFlow

__all__ = ["ImportantColumns"]

_ROLES = (Role.HP_PARAMS, Role.OPTIM_STATES, Role.OPTIM_STATES)


class ImportantColumns:
    """Compact state of a part's important columns.

    Args:
        part: The part; its state lies on the host, its weights on the device.
        records: Its parameters.
        settings: Which share of the columns, and where their state is between updates.
        memory: Where memory comes from.
    """

    def __init__(
        self,
        part: PartStorage,
        records: Sequence[ParamRecord],
        *,
        settings: ZenFlow,
        memory: PartMemory,
    ) -> None:
        self._part = part
        self._records = tuple(records)
        self._device = memory.device
        self._columns: dict[int, Columns] = {}
        self._here: set[int] = set()
        slices = [slice_of(record) for record in records]
        offsets, at = compact_offsets(slices, share=settings.topk_ratio)
        self._offsets = {r.index: first for r, first in zip(records, offsets, strict=True)}
        home = settings.keeps_state_on_host
        device = torch.device("cpu") if home else memory.device
        self._arenas = [
            memory.host_arena(4 * at, role=role, what="important columns' state")
            if home
            else DeviceArena(
                at,
                dtype=torch.float32,
                device=device,
                ledger=memory.ledger,
                role=role,
                what="important columns' state",
            )
            for role in _ROLES
        ]
        self._elements = at
        self._master = self._exp_avg = self._exp_avg_sq = torch.empty(0)
        self.rebind()

    @property
    def device_arenas(self) -> list[DeviceArena]:
        """Its memory on the device; nothing is in it while all state is at home."""
        return [arena for arena in self._arenas if isinstance(arena, DeviceArena)]

    def rebind(self) -> None:
        """See the memory that there is now."""
        self._master, self._exp_avg, self._exp_avg_sq = (
            arena.flat
            if isinstance(arena, DeviceArena)
            else arena.tensor(torch.float32, offset_bytes=0, elements=self._elements)
            for arena in self._arenas
        )

    def columns(self, record: ParamRecord) -> Columns | None:
        """The chosen columns; None before the first choice."""
        return self._columns.get(record.index)

    def choose(self, record: ParamRecord, columns: Columns) -> None:
        """Take other columns from now on; the state of the old ones goes home.

        Nothing may be reading or writing the part's state.
        """
        self.send_home([record])
        self._columns[record.index] = columns

    def forget(self, record: ParamRecord) -> None:
        """Columns are to be chosen anew, and what is here of them is worth nothing."""
        self._here.discard(record.index)
        self._columns.pop(record.index, None)

    def bring(self, records: Sequence[ParamRecord]) -> None:
        """Copy chosen columns' state here, where it is not; as `choose`."""
        for record in records:
            if record.index in self._here:
                continue
            self._bring_master(record)
            for role, here in (("exp_avg", self._exp_avg), ("exp_avg_sq", self._exp_avg_sq)):
                self._take(record, here, self._of_part(record, getattr(self._part, role)))
            self._here.add(record.index)

    def master_changed(self, record: ParamRecord) -> None:
        """The part's master of all columns is newer than what is here."""
        if record.index in self._here:
            self._bring_master(record)

    def _bring_master(self, record: ParamRecord) -> None:
        part = self._part
        high = self._of_part(record, part.high)
        if part.low is None:
            self._take(record, self._master, high)
            return
        columns = self._columns[record.index]
        low = self._of_part(record, part.low)
        self._span(record, self._master).copy_(join(columns.pick(high), columns.pick(low)))

    def send_home(self, records: Sequence[ParamRecord] | None = None) -> None:
        """Write state that is here back into the part's; as `choose`.

        Args:
            records: Whose; None for all.
        """
        part = self._part
        chosen = self._records if records is None else records
        for record in [record for record in chosen if record.index in self._here]:
            part.await_readers()
            columns = self._columns[record.index]
            master = self._span(record, self._master).cpu()
            if part.low is None:
                columns.put(self._of_part(record, part.high), master)
            else:
                high, low = split(master)
                columns.put(self._of_part(record, part.high), high)
                columns.put(self._of_part(record, part.low), low)
            for role, here in (("exp_avg", self._exp_avg), ("exp_avg_sq", self._exp_avg_sq)):
                home = self._of_part(record, getattr(part, role))
                columns.put(home, self._span(record, here).cpu())
            self._here.discard(record.index)

    def update(
        self, grads: Mapping[int, torch.Tensor], order: UpdateOrder, *, math: DeviceMath
    ) -> None:
        """Update columns that are here, in the order of the compute stream, weights included.

        Args:
            grads: Compact gradients by parameter index; of those in `order` at most.
            order: Hyperparameters and scale.
            math: Arithmetic on the device.
        """
        chosen = [r for r in self._records if r.index in grads]
        if not chosen:
            return
        own = (self._master, self._exp_avg, self._exp_avg_sq)
        on_device = [state.to(self._device) for state in own]
        math.update(
            FlatState(
                high=on_device[0],
                low=None,
                exp_avg=on_device[1],
                exp_avg_sq=on_device[2],
                out=None,
                segments=tuple(
                    (self._offsets[r.index], self._columns[r.index].elements) for r in chosen
                ),
            ),
            grads=[grads[record.index] for record in chosen],
            hypers=order.hypers,
            hyper_of_segment=[order.hyper_of[record.index] for record in chosen],
            scale=order.scale,
        )
        for record in chosen:
            self._show(record, on_device[0])
        for state, updated in zip(own, on_device, strict=True):
            if updated is not state:
                state.copy_(updated)

    def show(self) -> None:
        """Write all weights that are here into the working weights, in stream order."""
        if self._here:
            master = self._master.to(self._device)
            for record in self._records:
                if record.index in self._here:
                    self._show(record, master)

    def _show(self, record: ParamRecord, master: torch.Tensor) -> None:
        weights = round_to(self._span(record, master), self._part.dtype)
        self._columns[record.index].put(self._of_part(record, self._part.own_weights), weights)

    def _take(self, record: ParamRecord, here: torch.Tensor, home: torch.Tensor) -> None:
        self._span(record, here).copy_(self._columns[record.index].pick(home))

    def _span(self, record: ParamRecord, flat: torch.Tensor) -> torch.Tensor:
        start = self._offsets[record.index]
        return flat[start : start + self._columns[record.index].elements]

    @staticmethod
    def _of_part(record: ParamRecord, flat: torch.Tensor) -> torch.Tensor:
        return flat[record.segment.offset : record.segment.end]

    def close(self) -> None:
        """Give the memory back."""
        self._here.clear()
        self._master = self._exp_avg = self._exp_avg_sq = torch.empty(0)
        for arena in self._arenas:
            arena.close()


def slice_of(record: ParamRecord) -> ColumnSlice:
    """What this rank holds of a parameter, as columns are counted."""
    segment = record.segment
    return ColumnSlice.of(record.slot.shape, start=segment.start, elements=segment.elements)
