"""Gradients that are summed over ranks: landed as fp32 sums, their squares taken by block.

The counterpart of `forebay.engine.gradients` where there are several ranks: what arrives is this
rank's slice of a part (or, where every rank holds all state, the whole part), not one tensor for
each parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.engine.gradients import follow
from forebay.engine.record import GradientState
from forebay.model.layout import SUM_ITEM_BYTES
from forebay.optim.block_sums import BlockSums
from forebay.plan.program import Lane

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from forebay.engine.gradients import GradientPath
    from forebay.engine.part import PartStorage
    from forebay.engine.record import ParamRecord
    from forebay.engine.unit import Unit
    from forebay.links.lanes import Lanes

__all__ = ["SharedGradients"]


class SharedGradients:
    """Lands sums and takes their squares.

    Args:
        units: Every unit by index.
        lanes: Worker pool and link.
        local: Brings down weights that the device updated last.
    """

    def __init__(self, units: Sequence[Unit], *, lanes: Lanes, local: GradientPath) -> None:
        self._units = units
        self._lanes = lanes
        self._local = local
        self._blocks: BlockSums[tuple[int, int]] = BlockSums(lanes.core, lanes.pool)

    def norm(self, unit: Unit) -> None:
        """Squares of this rank's slice alone, also where it has all sums."""
        for number, part in enumerate(unit.parts):
            if part.sums.here is not None and not part.sums.have_landed:
                own = part.sums.here[part.own.start : part.own.end]
                self._blocks.begin((unit.index, number), own)

    def block_sums(self) -> dict[tuple[int, int], torch.Tensor]:
        """Sums of the squares of blocks of this rank's slices, by unit and number of the part."""
        for unit in self._units:
            for number, part in enumerate(unit.parts):
                if part.sums.have_grown:
                    self._blocks.begin_at(
                        (unit.index, number),
                        part.gradient_address + SUM_ITEM_BYTES * part.own.start,
                        part.own.elements,
                        after=follow(part),
                    )
        return self._blocks.read()

    def keep(self, unit: Unit) -> None:
        """Keep sums where their state is on a visit, else land them."""
        if unit.staging is None:
            self.land(unit)

    def land(self, unit: Unit) -> None:
        """Bring sums to the host; what comes after them is added there."""
        for part, records in zip(unit.parts, unit.records_of_part, strict=True):
            sums, part.sums.here = part.sums.here, None
            if sums is None:
                continue
            if part.sums.have_landed:
                self._add(part, records, sums)
            else:
                self._copy(part, records, sums)
            for record in records:
                if record.state is GradientState.OPEN:
                    record.move(GradientState.LANDED)

    def land_fold(self, unit: Unit) -> None:
        """Nothing is summed on the host by addends."""

    def _copy(self, part: PartStorage, records: Sequence[ParamRecord], sums: torch.Tensor) -> None:
        spans = [
            (
                part.gradient_address + SUM_ITEM_BYTES * r.segment.offset,
                sums.data_ptr() + SUM_ITEM_BYTES * r.segment.offset,
                SUM_ITEM_BYTES * r.segment.elements,
            )
            for r in records
            if r.segment.elements
        ]
        part.sums.have_landed = True
        if spans:
            event = self._lanes.accelerator.record_event()
            ticket, nbytes = self._lanes.land(spans, event=event.handle, after=follow(part))
            self._lanes.traffic[Lane.DOWN] += nbytes
            part.ticket = self._lanes.hold_gradients(ticket, [sums], event)
        self._local.refresh_high(part)

    def _add(self, part: PartStorage, records: Sequence[ParamRecord], sums: torch.Tensor) -> None:
        spans = [
            (
                part.gradient_address + SUM_ITEM_BYTES * r.segment.offset,
                sums.data_ptr() + SUM_ITEM_BYTES * r.segment.offset,
                r.segment.elements,
            )
            for r in records
            if r.segment.elements
        ]
        part.sums.have_grown = True
        if spans:
            event = self._lanes.accelerator.record_event()
            ticket = self._lanes.fold_down(
                spans, dtype="float32", first=False, after=follow(part), event=event.handle
            )
            self._lanes.traffic[Lane.DOWN] += SUM_ITEM_BYTES * sum(span[2] for span in spans)
            part.ticket = self._lanes.hold_gradients(ticket, [sums], event)

    def final(self, record: ParamRecord) -> torch.Tensor:
        """This rank's piece of a sum, on the device."""
        reduced = record.part.sums.here
        assert reduced is not None
        return record.part.view(reduced, record.slot)

    def leaving(self, unit: Unit) -> list[tuple[ParamRecord, torch.Tensor]]:
        """What `land` would bring to the host: parameters and this rank's pieces of their sums."""
        return [
            (record, self.final(record))
            for record in unit.records
            if record.part.sums.here is not None
        ]

    def has_grown(self, record: ParamRecord) -> bool:
        """Whether sums were added to others on the host."""
        return record.part.sums.have_grown

    def refresh_high(self, part: PartStorage) -> None:
        """Bring down weights that the device updated last, where the host updates next."""
        self._local.refresh_high(part)

    def catch_up(self) -> None:
        """Nothing waits."""

    def forget(self) -> None:
        """The window is over."""
        self._blocks.drop()

    def discard(self) -> None:
        """The window was dropped."""
        self._blocks.drop()
