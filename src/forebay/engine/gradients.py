"""Final gradients: kept where they are or brought to the host, and their squares summed there.

One object per engine, driven by the executor: a method for each operation on gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.engine.landing import GradientForm
from forebay.engine.record import GradientState
from forebay.model.layout import ITEM_BYTES, SUM_ITEM_BYTES
from forebay.plan.program import Lane

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from forebay.engine.part import PartStorage
    from forebay.engine.record import ParamRecord
    from forebay.engine.unit import Unit
    from forebay.links.lanes import Lanes
    from forebay.optim.device_math import DeviceMath

__all__ = ["GradientPath", "before_update", "follow"]


class GradientPath:
    """Lands gradients and sums their squares.

    Args:
        lanes: Worker pool and link.
        math: Arithmetic on the device.
        traffic: Bytes by lane; counted up as they are enqueued.
    """

    def __init__(self, *, lanes: Lanes, math: DeviceMath, traffic: dict[Lane, int]) -> None:
        self._lanes = lanes
        self._math = math
        self._traffic = traffic
        self._accelerator = lanes.accelerator
        # Parameters whose final gradient lies on the host, so that its squares are summed there;
        # the ticket of that, once it has begun.
        self._on_host: dict[int, Any] = {}
        # Units whose gradient waits for the sum of earlier backwards.
        self._late: list[Unit] = []

    def norm(self, unit: Unit) -> None:
        """Sum the squares of a unit's final gradient where it lies."""
        if unit.sums_on_host:
            self._begin_on_host([r for r in unit.records if r.index in self._on_host])
        elif any(r.arrival is not None and not r.arrival.done for r in unit.records):
            self._late.append(unit)
        else:
            self._norm_on_device(unit)

    def _norm_on_device(self, unit: Unit) -> None:
        open_records = [r for r in unit.records if r.state is GradientState.OPEN]
        if open_records:
            values = [record.device_value() for record in open_records]
            self._math.square_sums([r.index for r in open_records], values)
            for record in open_records:
                self._on_host.pop(record.index, None)

    def catch_up(self, *, everything: bool = False) -> None:
        """Sum the squares that waited for an arrival; all of them, or those that wait no more."""
        waiting, self._late = self._late, []
        for unit in waiting:
            if unit.sums_on_host:
                continue  # its state left again: the gradient lands
            if everything:
                self._norm_on_device(unit)
            else:
                self.norm(unit)

    def square_sums(self, records: Sequence[ParamRecord]) -> dict[int, float]:
        """Squares of `records` by parameter index; waits for them."""
        self.catch_up(everything=True)
        sums = self._math.read()
        self._begin_on_host([r for r in records if r.index in self._on_host])
        for record in records:
            ticket = self._on_host.get(record.index)
            if ticket is not None:
                ticket.wait()
                sums[record.index] = ticket.results()[0]
        return sums

    def _begin_on_host(self, records: Sequence[ParamRecord]) -> None:
        for record in records:
            if self._on_host[record.index] is not None:
                continue
            part = record.part
            item = ITEM_BYTES[part.gradient_dtype]
            segment = record.segment
            span = (part.gradient_address + item * segment.offset, segment.elements)
            ticket = self._lanes.square_sums([span], part.gradient_dtype, follow(part))
            self._on_host[record.index] = self._lanes.hold(ticket)
            part.squares.append(ticket)

    def forget(self) -> None:
        """The window is over: nothing that was begun is wanted any more."""
        self._on_host.clear()
        self._late.clear()

    def discard(self) -> None:
        """As `forget`, also what the device has begun."""
        self.forget()
        self._math.read()

    def keep(self, unit: Unit) -> None:
        """Keep a gradient where its state is on a visit, else land it."""
        if unit.staging is not None:
            return
        if not unit.sums_on_host:
            self.land(unit)
            return
        self.land_fold(unit)
        for part in unit.parts:
            self.refresh_high(part)

    def final(self, record: ParamRecord) -> torch.Tensor:
        """A final gradient on the device."""
        return record.device_value()

    def leaving(self, unit: Unit) -> list[tuple[ParamRecord, torch.Tensor]]:
        """What `land` would bring to the host: parameters and their final gradients."""
        return [(r, r.device_value()) for r in unit.records if r.state is GradientState.OPEN]

    def has_grown(self, record: ParamRecord) -> bool:
        """Whether addends were added to a gradient on the host."""
        return record.index in self._on_host

    def refresh_high(self, part: PartStorage) -> None:
        """Bring down weights that the device updated last, where the host updates next."""
        if part.high_is_stale:
            here = part.own_weights
            self._land_spans(part, [(part.high.data_ptr(), here.data_ptr(), here.nbytes)], [here])
            part.high_is_stale = False

    def _land_spans(
        self,
        part: PartStorage,
        spans: Sequence[tuple[int, int, int]],
        values: Sequence[torch.Tensor],
    ) -> None:
        event = self._accelerator.record_event()
        ticket, nbytes = self._lanes.land(spans, event=event.handle, after=follow(part))
        self._traffic[Lane.DOWN] += nbytes
        part.ticket = self._lanes.hold_gradients(ticket, values, event)

    def land(self, unit: Unit) -> None:
        """Bring a unit's gradient to the host."""
        for part, records in zip(unit.parts, unit.records_of_part, strict=True):
            leaving = [r for r in records if r.state is GradientState.OPEN]
            if not leaving:
                continue
            values = [record.device_value() for record in leaving]
            narrow = part.landing.form is GradientForm.NATIVE
            if narrow and any(value.dtype != part.dtype for value in values):
                self._widen(part, records)
            if part.landing.form is GradientForm.FP32:
                values = [value.float() for value in values]
            item = ITEM_BYTES[part.gradient_dtype]
            base = part.gradient_address
            spans = [
                (
                    base + item * record.segment.offset,
                    value.data_ptr(),
                    item * record.segment.elements,
                )
                for record, value in zip(leaving, values, strict=True)
                if record.segment.elements
            ]
            if part.high_is_stale:  # the device updated this part last; now the host will
                here = part.own_weights
                spans.append((part.high.data_ptr(), here.data_ptr(), here.nbytes))
                part.high_is_stale = False
            self._land_spans(part, spans, values)
            _mark_landed(leaving)

    def land_fold(self, unit: Unit) -> None:
        """Bring the addends of a backward to the host and add them to the sums there."""
        if not unit.sums_on_host:
            return  # its sum is on the device
        for part, records in zip(unit.parts, unit.records_of_part, strict=True):
            leaving = [r for r in records if r.state is GradientState.OPEN or r.addends]
            for record in leaving:
                if record.zeroed and not record.addends:
                    record.device_value()
            self._land_sums(part, [r for r in leaving if r.total is not None])
            rounds = max((len(r.addends) for r in leaving), default=0)
            for turn in range(rounds):
                batch = [(r, r.addends[turn]) for r in leaving if len(r.addends) > turn]
                fresh = [b for b in batch if b[0].state is GradientState.OPEN and turn == 0]
                more = [b for b in batch if b not in fresh] if len(fresh) < len(batch) else []
                self._fold_down(part, fresh, first=True)
                self._fold_down(part, more, first=False)
            self._on_host.update(dict.fromkeys(record.index for record in leaving))
            _mark_landed(leaving)

    def _land_sums(self, part: PartStorage, records: Sequence[ParamRecord]) -> None:
        """Send sums home that had come up for an update on the device."""
        values = [record.device_value() for record in records]
        spans = [
            (
                part.gradient_address + SUM_ITEM_BYTES * seg.offset,
                value.data_ptr(),
                SUM_ITEM_BYTES * seg.elements,
            )
            for seg, value in zip((r.segment for r in records), values, strict=True)
            if seg.elements
        ]
        if spans:
            self._land_spans(part, spans, values)
        _mark_landed(records)

    def fold_late(self, unit: Unit, record: ParamRecord, addend: torch.Tensor) -> None:
        """Add an addend to a gradient that has already landed."""
        part = record.part
        if part.landing.form is GradientForm.NATIVE and part.layout.dtype != "float32":
            members = unit.records_of_part[unit.parts.index(part)]
            self._widen(part, members)
        self._fold_down(part, [(record, addend)], first=False)
        self._on_host[record.index] = None

    def _fold_down(
        self,
        part: PartStorage,
        batch: Sequence[tuple[ParamRecord, torch.Tensor]],
        *,
        first: bool,
    ) -> None:
        spans = [
            (part.gradient_address + 4 * r.segment.offset, value.data_ptr(), r.segment.elements)
            for r, value in batch
            if r.segment.elements
        ]
        if not spans:
            return
        event = self._accelerator.record_event()
        ticket = self._lanes.fold_down(
            spans,
            dtype=part.layout.dtype,
            first=first,
            after=follow(part),
            event=event.handle,
        )
        self._traffic[Lane.DOWN] += ITEM_BYTES[part.layout.dtype] * sum(s[2] for s in spans)
        part.ticket = self._lanes.hold_gradients(ticket, [value for _, value in batch], event)

    def _widen(self, part: PartStorage, records: Sequence[ParamRecord]) -> None:
        """Give a part's landed gradient fp32 room and move what has landed there."""
        dtype, item = part.gradient_dtype, ITEM_BYTES[part.gradient_dtype]
        old = part.landing.widen()
        spans = [
            (
                part.gradient_address + 4 * r.segment.offset,
                old + item * r.segment.offset,
                r.segment.elements,
            )
            for r in records
            if r.state is GradientState.LANDED and r.segment.elements
        ]
        if spans:
            ticket = self._lanes.fold(
                spans,
                dtype,
                True,  # noqa: FBT003 - the first addend of these sums
                follow(part),
            )
            part.ticket = self._lanes.hold(ticket, part.landing.spare)


def follow(part: PartStorage) -> list[Any]:
    """What the next operation on a part waits for."""
    return [] if part.ticket is None else [part.ticket]


def before_update(part: PartStorage) -> list[Any]:
    """What an update of a part comes after: its gradient, and whoever still reads what it changes.

    The old weights are loaded by passes; a whole master's new weights lie over the gradient, whose
    squares may still be summed where the update begins during backward.
    """
    part.loads = [ticket for ticket in part.loads if not ticket.done]
    part.squares = [ticket for ticket in part.squares if not ticket.done]
    return [*follow(part), *part.loads, *part.squares]


def _mark_landed(records: Sequence[ParamRecord]) -> None:
    for record in records:
        record.addends.clear()
        record.total = None
        record.zeroed = False
        record.move(GradientState.LANDED)
