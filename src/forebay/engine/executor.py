"""The executor: carries out a program's operations on real bytes.

It follows the program; it decides nothing. One handler per kind of operation; each enqueues on
a lane and returns. Bytes are counted per lane as they are enqueued.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.engine.gradients import GradientPath, before_update
from forebay.links.observer import Moment
from forebay.optim.flat_state import FlatState, native_part
from forebay.optim.reference import round_to
from forebay.plan.placement import MasterLayout, UpdatePlace
from forebay.plan.program import UPDATING, Lane, OpKind, Trigger, TriggerKind, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.engine.part import PartStorage
    from forebay.engine.publisher import Publisher
    from forebay.engine.record import ParamRecord
    from forebay.engine.shared_gradients import SharedGradients
    from forebay.engine.spool import Spool
    from forebay.engine.streamer import StagedPart, Streamer
    from forebay.engine.terms import UpdateOrder
    from forebay.engine.unit import Unit
    from forebay.engine.watched_gradients import WatchedGradients
    from forebay.links.lanes import Lanes
    from forebay.optim.device_math import DeviceMath
    from forebay.plan.program import Op, Program

    Spread = Callable[[Unit, Sequence[ParamRecord], Sequence[Any]], None]

__all__ = ["Executor", "HeldUpdates"]

# Operations that a gradient may start and that others see to: updates, and sums over ranks.
_ELSEWHERE = UPDATING | {OpKind.REDUCE}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldUpdates:
    """Updates whose new weights are not in force yet.

    Attributes:
        order: What they are made with; parameters may be struck out of it.
        tickets: By unit, the ticket of each part's update; None where it has none.
    """

    order: UpdateOrder
    tickets: dict[int, list[Any]]


class Executor:
    """Executes programs.

    Args:
        units: Every unit by index.
        lanes: Worker pool and link.
        math: Arithmetic on the device.
        streamer: Moves state that visits the device.
        publisher: Takes new weights.
        piece_elements: Elements of one piece of an update and of the copy that follows it.

    Attributes:
        traffic: Bytes moved so far over each lane.
        spool: Updates state in files; None where there is none.
        on_departed: Told when a unit's gradient of the window's last backward is on its way, summed
            over ranks; None where nobody asks.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        lanes: Lanes,
        math: DeviceMath,
        streamer: Streamer,
        publisher: Publisher,
        piece_elements: int,
    ) -> None:
        self.units = units
        self.lanes = lanes
        self.math = math
        self.mark, self.waiting = lanes.mark, lanes.waiting
        self._accelerator = lanes.accelerator
        self._streamer = streamer
        self.publisher = publisher
        self._piece = piece_elements
        self.traffic = lanes.traffic
        self.device = lanes.accelerator.device
        self.local = GradientPath(lanes=lanes, math=math, traffic=self.traffic)
        self.gradients: GradientPath | SharedGradients | WatchedGradients = self.local
        # Brings a unit's new weights to all ranks, after those of its own slice.
        self.spread: Spread | None = None
        self.spool: Spool | None = None
        self.on_departed: Callable[[Unit], None] | None = None
        self._order: UpdateOrder | None = None
        self._updates: dict[int, list[Any]] = {}
        self._natives: dict[tuple[PartStorage, int], tuple[tuple[int, ...], Any]] = {}
        self._handlers: dict[OpKind, Callable[[Unit], None]] = {
            OpKind.GATHER: self._gather,
            OpKind.UPDATE: self._update,
            OpKind.PUBLISH: self._publish,
            OpKind.WRITE_BACK: self._write_back,
            OpKind.STORE: _piece_by_piece,
        }
        self.use(self.local)

    def use(self, gradients: GradientPath | SharedGradients | WatchedGradients) -> None:
        """Let gradients take this path from now on."""
        self.gradients = gradients
        self._handlers |= {
            OpKind.NORM: gradients.norm,
            OpKind.LAND: gradients.land,
            OpKind.LAND_FOLD: gradients.land_fold,
            OpKind.KEEP: gradients.keep,
        }

    def gradient_complete(self, program: Program, unit: Unit, *, last: bool) -> None:
        """Run what a unit's complete gradient starts; sums over ranks have been made already."""
        turns = (Turn.EVERY, Turn.LAST if last else Turn.EARLIER)
        for op in program.at(Trigger(TriggerKind.GRADIENT, unit.index)):
            if op.kind not in _ELSEWHERE and op.turn in turns:
                self._run(op, unit)
        self.gradients.catch_up()
        self.traffic[Lane.UP] += self._streamer.pump()
        if last and self.on_departed is not None:
            self.on_departed(unit)

    def last_backward_begins(self, program: Program) -> None:
        """State may come up from now on, in the order in which the next forward needs it."""
        begun = program.at(Trigger(TriggerKind.BACKWARD))
        fetches, reads = (
            [self.units[op.unit] for op in begun if op.kind is kind and op.unit is not None]
            for kind in (OpKind.FETCH, OpKind.READ)
        )
        self._streamer.begin(reversed(fetches))
        if self.spool is not None:
            self.spool.read_ahead(reads)
        self.traffic[Lane.UP] += self._streamer.pump()

    def update_all(self, program: Program, order: UpdateOrder) -> None:
        """Run the updates of a step, in the program's order, those on the host first.

        Of units that were updated early, new weights on the host go up now.
        """
        self._order = order
        started = [
            (op, self.units[op.unit])
            for op in program.updates
            if op.unit is not None and not self._is_done(op)
        ]
        on_device = {unit.index for _, unit in started if unit.updates_on_device}
        gathers = [(op, unit) for op, unit in started if op.kind is OpKind.GATHER]
        local = [(op, unit) for op, unit in started if op.kind is not OpKind.GATHER]
        for op, unit in sorted(local, key=lambda pair: pair[1].index in on_device):
            self._run(op, unit)
        for index in sorted(on_device):
            unit = self.units[index]
            unit.mark_changed([r for r in unit.records if r.index in order.hyper_of])
        # In the program's order, whatever was updated where: every rank gathers alike.
        for op, unit in gathers:
            self._run(op, unit)
        self._streamer.drop()
        self._updates.clear()
        self._order = None

    def update_early(self, program: Program, unit: Unit, order: UpdateOrder) -> None:
        """Update one unit now; weights that the host makes new go up in `update_all`."""
        self.gradients.catch_up()
        self._order = order
        visits = unit.staging is not None
        for op in program.at(Trigger(TriggerKind.GRADIENT, unit.index)):
            if op.kind is OpKind.UPDATE or (op.kind is OpKind.WRITE_BACK and visits):
                self._run(op, unit)
        self._order = None

    def update_behind(self, program: Program, order: UpdateOrder) -> HeldUpdates:
        """Run a step's updates, those on the host first; their weights wait there.

        Until `come_into_force`; those of updates on the device are in their masters.
        """
        self._order = order
        started = [op for op in program.updates if op.kind is OpKind.UPDATE]
        for op in sorted(started, key=lambda op: op.lane is Lane.COMPUTE):
            assert op.unit is not None
            unit = self.units[op.unit]
            if unit.placement.update is UpdatePlace.NVME and self.spool is not None:
                self._updates[unit.index] = self.spool.update_behind(unit, order)
            else:
                self._run(op, unit)
        updates, self._updates, self._order = self._updates, {}, None
        return HeldUpdates(order=order, tickets=updates)

    def come_into_force(self, program: Program, held: HeldUpdates) -> None:
        """Bring new weights to the device (and all ranks), in the order of the next forward."""
        self._order, self._updates = held.order, held.tickets
        for op in program.updates:
            if op.kind in (OpKind.PUBLISH, OpKind.GATHER) and op.unit is not None:
                self._run(op, self.units[op.unit])
        self._order, self._updates = None, {}

    def adopt(self, unit: Unit, tickets: list[Any]) -> None:
        """A unit's update was made elsewhere: `update_all` does what follows it."""
        self._updates[unit.index] = tickets
        unit.updated = True

    def _is_done(self, op: Op) -> bool:
        """Whether an early update did an operation already."""
        assert op.unit is not None
        if not self.units[op.unit].updated:
            return False
        return op.kind is OpKind.UPDATE or not self._updates.get(op.unit)

    def drop_staged(self) -> None:
        """The step was skipped: what came up goes nowhere."""
        self._streamer.drop()

    def discard(self) -> None:
        """The window was discarded: let go of what its gradients had started."""
        self.gradients.discard()
        self._updates.clear()
        self._streamer.drop()
        self.lanes.reap()

    def close(self) -> None:
        """Give back the memory that state in files passes through; the lanes are closed."""
        if self.spool is not None:
            self.spool.close()

    def _run(self, op: Op, unit: Unit) -> None:
        self.lanes.observer.doing(op.kind, unit.name)
        self._handlers[op.kind](unit)

    def _gather(self, unit: Unit) -> None:
        order, spread = self._order, self.spread
        assert order is not None
        assert spread is not None
        changed = [record for record in unit.records if record.index in order.hyper_of]
        arrivals = self.publisher.arrivals.pop(unit.index, [])
        if changed:
            spread(unit, changed, arrivals)

    def _write_back(self, unit: Unit) -> None:
        if unit.staging is None:
            self._publish(unit)
        elif unit.index in self._updates:
            assert self._order is not None
            nbytes, homes = self._streamer.write_back(unit)
            self.traffic[Lane.DOWN] += nbytes
            self.publisher.written_back(unit, self._order.hyper_of, homes)

    def _update(self, unit: Unit) -> None:
        if unit.updates_on_device:
            self._update_on_device(unit)
        elif unit.placement.update is UpdatePlace.NVME:
            assert self.spool is not None
            assert self._order is not None
            self.spool.update(unit, self._order)
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
                    self.gradients.final(record) if index >= 0 else None
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
        self._updates[unit.index] = [
            self.update_part(part, records, order)
            for part, records in zip(unit.parts, unit.records_of_part, strict=True)
        ]

    def update_part(
        self, part: PartStorage, records: Sequence[ParamRecord], order: UpdateOrder
    ) -> Any:
        """Update a part on the host, with the gradient that lies there.

        Args:
            part: The part.
            records: Its parameters.
            order: Which of them change, and by what.

        Returns:
            The ticket; None where none of them changes.
        """
        chosen = [order.hyper_of.get(record.index, -1) for record in records]
        if all(index < 0 for index in chosen):
            return None
        part.await_readers()
        self.gradients.refresh_high(part)
        native, numbers = self._native(part), order.native(self.lanes.core)
        ticket = self.lanes.update(
            native, numbers, chosen, order.scale, self._piece, None, before_update(part)
        )
        part.ticket = self.lanes.hold(ticket, native)
        return ticket

    def _native(self, part: PartStorage) -> Any:
        """The native form of a part, which is used again while its addresses are the same."""
        out = _rounded_weights(part)
        key = (part.gradient_address, out, part.high.data_ptr(), part.exp_avg.data_ptr())
        known = self._natives.get((part, part.gradient_address))
        if known is not None and known[0] == key:
            return known[1]
        native = native_part(
            self.lanes.core,
            _flat_state(part),
            grad=part.gradient_address,
            grad_dtype=part.gradient_dtype,
            out=out,
            out_dtype=part.layout.dtype,
        )
        self._natives[part, part.gradient_address] = (key, native)
        return native

    def _publish(self, unit: Unit) -> None:
        order = self._order
        assert order is not None
        if unit.placement.update is UpdatePlace.NVME:
            if unit.index in self._updates and self.spool is not None:  # else piece by piece
                self.spool.publish(unit, self._updates[unit.index], order)
            return
        if unit.placement.update is UpdatePlace.DEVICE:
            _show(unit, [r for r in unit.records if r.index in order.hyper_of])
            return
        self.publisher.publish(unit, self._updates[unit.index], order.hyper_of)


def _rounded_weights(part: PartStorage) -> int:
    """Where the host writes weights beside whole masters: over the gradient unless they stay."""
    if part.master is not MasterLayout.WHOLE:
        return 0
    return part.weights.data_ptr() if part.stores_on_host else part.gradient_address


def _show(unit: Unit, changed: Sequence[ParamRecord]) -> None:
    """The weights of some parameters are their masters on the device, rounded, from now on."""
    for record in changed:
        part, held = record.part, record.segment
        here = slice(held.offset, held.end)
        part.own_weights[here] = round_to(part.high[here], part.dtype)
    unit.mark_changed(changed)


def _piece_by_piece(unit: Unit) -> None:
    """State in files: each piece is published and written back where it is updated."""
    del unit


def _flat_state(part: PartStorage) -> FlatState:
    on_device_whole = part.master is MasterLayout.WHOLE and not part.on_host
    shows = on_device_whole and not part.shows_later
    return FlatState(
        high=part.high,
        low=part.low,
        exp_avg=part.exp_avg,
        exp_avg_sq=part.exp_avg_sq,
        out=part.own_weights if shows else None,
        segments=part.update_segments,
    )
