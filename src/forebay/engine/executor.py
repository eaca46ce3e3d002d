"""The executor: carries out a program's operations on real bytes.

It follows the program; it decides nothing. One handler per kind of operation; each enqueues on
a lane and returns. Bytes are counted per lane as they are enqueued.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.engine.part import GradientForm
from forebay.engine.record import GradientState
from forebay.links.observer import Moment
from forebay.model.layout import ITEM_BYTES
from forebay.optim.flat_state import FlatState, native_hypers, native_part
from forebay.plan.placement import MasterLayout
from forebay.plan.program import Lane, OpKind, Trigger, TriggerKind, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from forebay.engine.part import PartStorage
    from forebay.engine.record import ParamRecord
    from forebay.engine.streamer import StagedPart, Streamer
    from forebay.engine.unit import NanSource, Unit
    from forebay.links.lanes import Lanes
    from forebay.optim.device_math import DeviceMath
    from forebay.optim.rule import Hyper
    from forebay.plan.program import Op, Program

__all__ = ["Executor", "UpdateOrder"]


class UpdateOrder:
    """What one step tells the executor: hyperparameters and the one scale.

    Attributes:
        hypers: Distinct captured hyperparameters.
        hyper_of: For each present parameter's index, its place in `hypers`.
        scale: What gradients are multiplied by, float32.
    """

    def __init__(self, hypers: Sequence[Hyper], hyper_of: dict[int, int], scale: float) -> None:
        self.hypers = tuple(hypers)
        self.hyper_of = hyper_of
        self.scale = scale


class Executor:
    """Executes programs.

    Args:
        units: Every unit by index.
        lanes: Worker pool and link.
        math: Arithmetic on the device.
        nans: Source of NaN views for pending weights.
        streamer: Moves state that visits the device.
        piece_elements: Elements of one piece of an update and of the copy that follows it.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        lanes: Lanes,
        math: DeviceMath,
        nans: NanSource,
        streamer: Streamer,
        piece_elements: int,
    ) -> None:
        self._units = units
        self._lanes = lanes
        self.math = math
        self.mark, self.waiting = lanes.mark, lanes.waiting
        self._accelerator = lanes.accelerator
        self._nans = nans
        self._streamer = streamer
        self._piece = piece_elements
        self.traffic = dict.fromkeys(Lane, 0)
        # Parameters whose final gradient lies on the host, so that its squares are summed there.
        self.norm_on_host: set[int] = set()
        self._order: UpdateOrder | None = None
        self._updates: dict[int, list[Any]] = {}
        self._handlers: dict[OpKind, Callable[[Unit], None]] = {
            OpKind.LAND: self._land,
            OpKind.LAND_FOLD: self._land_fold,
            OpKind.UPDATE: self._update,
            OpKind.PUBLISH: self._publish,
            OpKind.KEEP: self._keep,
            OpKind.WRITE_BACK: self._write_back,
        }

    def gradient_complete(self, program: Program, unit: Unit, *, last: bool) -> None:
        """Run what a unit's complete gradient starts."""
        for op in program.at(Trigger(TriggerKind.GRADIENT, unit.index)):
            if op.turn is Turn.EVERY or last:
                self._run(op, unit)
        self.traffic[Lane.UP] += self._streamer.pump()

    def last_backward_begins(self, program: Program) -> None:
        """State may come up from now on, in the order in which the next forward needs it."""
        fetches = program.at(Trigger(TriggerKind.BACKWARD))
        self._streamer.begin(
            self._units[op.unit] for op in reversed(fetches) if op.unit is not None
        )
        self.traffic[Lane.UP] += self._streamer.pump()

    def update_all(self, program: Program, order: UpdateOrder) -> None:
        """Run the updates of a step, in the program's order, those on the host first."""
        self._order = order
        started = [
            (op, self._units[op.unit])
            for op in program.at(Trigger(TriggerKind.STEP))
            if op.unit is not None and op.kind is not OpKind.NORM
        ]
        on_device = {unit.index for _, unit in started if unit.updates_on_device}
        for op, unit in sorted(started, key=lambda pair: pair[1].index in on_device):
            self._run(op, unit)
        self._streamer.drop()
        self._updates.clear()
        self._order = None

    def drop_staged(self) -> None:
        """The step was skipped: what came up goes nowhere."""
        self._streamer.drop()

    def discard(self) -> None:
        """The window was discarded: let go of what its gradients had started."""
        self.math.read()
        self.norm_on_host.clear()
        self._streamer.drop()
        self._lanes.reap()

    def _run(self, op: Op, unit: Unit) -> None:
        self._lanes.observer.doing(op.kind, unit.name)
        if op.kind is OpKind.NORM:
            self._norm(unit)
        else:
            self._handlers[op.kind](unit)

    def _norm(self, unit: Unit) -> None:
        open_records = [r for r in unit.records if r.state is GradientState.OPEN]
        if open_records:
            values = [record.device_value() for record in open_records]
            self.math.square_sums([r.index for r in open_records], values)
            self.norm_on_host.difference_update(r.index for r in open_records)

    def host_square_sums(self, records: Sequence[ParamRecord]) -> dict[int, float]:
        """Squares of gradients that were summed on the host; waits for them."""
        begun = []
        for record in records:
            part = record.part
            item = ITEM_BYTES[part.gradient_dtype]
            segment = record.segment
            span = (part.gradient_address + item * segment.offset, segment.elements)
            after = [] if part.ticket is None else [part.ticket]
            ticket = self._lanes.square_sums([span], part.gradient_dtype, after)
            begun.append((record.index, ticket))
        sums = {}
        for index, ticket in begun:
            ticket.wait()
            sums[index] = ticket.results()[0]
        return sums

    def _land(self, unit: Unit) -> None:
        for part, records in zip(unit.parts, unit.records_of_part, strict=True):
            leaving = [r for r in records if r.state is GradientState.OPEN]
            if not leaving:
                continue
            values = [record.device_value() for record in leaving]
            narrow = part.gradient_form is GradientForm.NATIVE
            if narrow and any(value.dtype != part.dtype for value in values):
                self._widen(part, records)
            if part.gradient_form is GradientForm.FP32:
                values = [value.float() for value in values]
            event = self._accelerator.record_event()
            item = ITEM_BYTES[part.gradient_dtype]
            base = part.gradient_address
            spans = [
                (base + item * seg.offset, value.data_ptr(), item * seg.elements)
                for seg, value in zip((r.segment for r in leaving), values, strict=True)
                if seg.elements
            ]
            if part.high_is_stale:  # the device updated this part last; now the host will
                here = part.own_weights
                spans.append((part.high.data_ptr(), here.data_ptr(), here.nbytes))
                part.high_is_stale = False
            ticket, nbytes = self._lanes.land(spans, event=event.handle, after=_after(part))
            self.traffic[Lane.DOWN] += nbytes
            part.ticket = self._lanes.hold_gradients(ticket, values, event)
            _mark_landed(leaving)

    def _land_fold(self, unit: Unit) -> None:
        for part, records in zip(unit.parts, unit.records_of_part, strict=True):
            leaving = [r for r in records if r.state is GradientState.OPEN or r.addends]
            for record in leaving:
                if record.zeroed and not record.addends:
                    record.device_value()
            rounds = max((len(r.addends) for r in leaving), default=0)
            for turn in range(rounds):
                batch = [(r, r.addends[turn]) for r in leaving if len(r.addends) > turn]
                fresh = [b for b in batch if b[0].state is GradientState.OPEN and turn == 0]
                more = [b for b in batch if b not in fresh] if len(fresh) < len(batch) else []
                self._fold_down(part, fresh, first=True)
                self._fold_down(part, more, first=False)
            self.norm_on_host.update(record.index for record in leaving)
            _mark_landed(leaving)

    def fold_late(self, unit: Unit, record: ParamRecord, addend: torch.Tensor) -> None:
        """Add an addend to a gradient that has already landed."""
        part = record.part
        if part.gradient_form is GradientForm.NATIVE and part.layout.dtype != "float32":
            members = unit.records_of_part[unit.parts.index(part)]
            self._widen(part, members)
        self._fold_down(part, [(record, addend)], first=False)
        self.norm_on_host.add(record.index)

    def _fold_down(
        self,
        part: PartStorage,
        batch: Sequence[tuple[ParamRecord, torch.Tensor]],
        *,
        first: bool,
    ) -> None:
        spans = [
            (part.gradient_address + 4 * seg.offset, value.data_ptr(), seg.elements)
            for seg, value in ((r.segment, value) for r, value in batch)
            if seg.elements
        ]
        if not spans:
            return
        event = self._accelerator.record_event()
        ticket = self._lanes.fold_down(
            spans,
            dtype=part.layout.dtype,
            first=first,
            after=_after(part),
            event=event.handle,
        )
        self.traffic[Lane.DOWN] += ITEM_BYTES[part.layout.dtype] * sum(s[2] for s in spans)
        part.ticket = self._lanes.hold_gradients(ticket, [value for _, value in batch], event)

    def _widen(self, part: PartStorage, records: Sequence[ParamRecord]) -> None:
        """Give a part's landed gradient fp32 room and move what has landed there."""
        dtype, item = part.gradient_dtype, ITEM_BYTES[part.gradient_dtype]
        old = part.widen_gradient()
        spans = [
            (part.gradient_address + 4 * seg.offset, old + item * seg.offset, seg.elements)
            for seg in (r.segment for r in records if r.state is GradientState.LANDED)
            if seg.elements
        ]
        if spans:
            ticket = self._lanes.fold(
                spans,
                dtype,
                True,  # noqa: FBT003 - the first addend of these sums
                _after(part),
            )
            part.ticket = self._lanes.hold(ticket, part.spare)

    def _keep(self, unit: Unit) -> None:
        if unit.staging is None:
            self._land(unit)

    def _write_back(self, unit: Unit) -> None:
        if unit.staging is None:
            self._publish(unit)
        elif unit.index in self._updates:
            self.traffic[Lane.DOWN] += self._streamer.write_back(unit)

    def _update(self, unit: Unit) -> None:
        if unit.updates_on_device:
            self._update_on_device(unit)
        else:
            self._update_on_host(unit)

    def _update_on_device(self, unit: Unit) -> None:
        order = self._order
        assert order is not None
        self.mark(Moment.UPDATE_BEGIN, unit.name)
        staging: list[StagedPart] | list[None] = [None] * len(unit.parts)
        if unit.staging is not None:
            staging = self._streamer.await_state(unit)
        for part, records, staged in zip(unit.parts, unit.records_of_part, staging, strict=True):
            chosen = [order.hyper_of.get(record.index, -1) for record in records]
            if all(index < 0 for index in chosen):
                continue
            part.await_readers()
            self._updates[unit.index] = []
            self.math.update(
                _flat_state(part) if staged is None else staged.state(part),
                grads=[
                    record.device_value() if index >= 0 else None
                    for record, index in zip(records, chosen, strict=True)
                ],
                hypers=order.hypers,
                hyper_of_segment=chosen,
                scale=order.scale,
            )
        self.mark(Moment.UPDATE_END, unit.name)

    def _update_on_host(self, unit: Unit) -> None:
        order = self._order
        assert order is not None
        tickets: list[Any] = []
        for part, records in zip(unit.parts, unit.records_of_part, strict=True):
            chosen = [order.hyper_of.get(record.index, -1) for record in records]
            tickets.append(None)
            if all(index < 0 for index in chosen):
                continue
            part.await_readers()
            state = _flat_state(part)
            native = native_part(
                self._lanes.core,
                state,
                grad=part.gradient_address,
                grad_dtype=part.gradient_dtype,
                out=part.gradient_address if part.master is MasterLayout.WHOLE else 0,
                out_dtype=part.layout.dtype,
            )
            numbers = native_hypers(self._lanes.core, order.hypers)
            ticket = self._lanes.update(
                native, numbers, chosen, order.scale, self._piece, None, _after(part)
            )
            part.ticket = tickets[-1] = self._lanes.hold(ticket, native)
        self._updates[unit.index] = tickets

    def _publish(self, unit: Unit) -> None:
        order = self._order
        assert order is not None
        arrivals, changed = [], []
        event = self._accelerator.record_event()
        for part, records, update in zip(
            unit.parts, unit.records_of_part, self._updates[unit.index], strict=True
        ):
            if update is None:
                continue
            present = [r for r in records if r.index in order.hyper_of]
            plan = self._publish_plan(part, present)
            ticket = self._lanes.publish(plan, after=update, event=event.handle)
            self.traffic[Lane.UP] += plan.nbytes
            part.ticket = self._lanes.hold(ticket, event)
            arrivals.append(ticket)
            changed.extend(present)
        if changed:
            unit.await_weights(changed, arrivals, self._nans)

    def _publish_plan(self, part: PartStorage, present: Sequence[ParamRecord]) -> Any:
        """Spans from the host's new weights to the device, cut where the update's pieces are."""
        plan = self._lanes.core.CopyPlan(1 << 62)
        item, pitch, source = _weights_on_host(part)
        target = part.own_weights.data_ptr()
        for record in present:
            start, end = record.segment.offset, record.segment.end
            while start < end:
                piece = start // self._piece
                stop = min(end, (piece + 1) * self._piece)
                head = piece * self._piece
                where = source + head * pitch + (start - head) * item
                plan.add(piece, target + start * item, where, (stop - start) * item)
                start = stop
        return plan


def _after(part: PartStorage) -> list[Any]:
    return [] if part.ticket is None else [part.ticket]


def _mark_landed(records: Sequence[ParamRecord]) -> None:
    for record in records:
        record.addends.clear()
        record.total = None
        record.zeroed = False
        record.move(GradientState.LANDED)


def _flat_state(part: PartStorage) -> FlatState:
    on_device_whole = part.master is MasterLayout.WHOLE and not part.on_host
    return FlatState(
        high=part.high,
        low=part.low,
        exp_avg=part.exp_avg,
        exp_avg_sq=part.exp_avg_sq,
        out=part.own_weights if on_device_whole else None,
        segments=part.update_segments,
    )


def _weights_on_host(part: PartStorage) -> tuple[int, int, int]:
    """(item bytes, bytes between piece starts per element, address) of new weights."""
    item = ITEM_BYTES[part.layout.dtype]
    if part.master is MasterLayout.WHOLE:
        # written over the gradient, compacted within each piece
        return item, ITEM_BYTES[part.gradient_dtype], part.gradient_address
    return item, item, part.high.data_ptr()
