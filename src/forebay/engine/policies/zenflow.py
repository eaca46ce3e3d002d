"""The ZenFlow policy: important columns in every step on the device, the rest once an interval.

`plan.zenflow.ZenFlow` says in which steps what happens. In a step, once it is decided: columns
are chosen by the step's own gradient, if it is time; important columns are updated by it on the
device; all of it, clipped and unscaled, is added to what is gathered on the host; and where the
interval ends, the rest is updated there with the mean of what was gathered, as one step of Adam
with the parameter's own step count. With overlap that update comes into force at the end of the
next interval, or before columns are chosen anew.

[Note: what the host does not know] Gradients are gathered and the host's state is updated for
whole parameters: strided columns would cost as much. What that does to important columns on the
host has no meaning, since their state is on the device, and it is overwritten when they go home.
New weights go up for whole parameters too, and the important ones are written over them when they
have arrived, before anybody reads.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from forebay.engine.masters import is_written
from forebay.engine.policies.importance import Importance, tell_sharers
from forebay.engine.policies.important import ImportantColumns
from forebay.engine.policies.rest import GatheredRest, RunningRest
from forebay.engine.policies.zenflow_state import (
    GatheredSource,
    ZenFlowCounts,
    columns_in,
    is_of_zenflow,
)
from forebay.engine.policy import UpdatePolicy
from forebay.engine.terms import UpdateOrder
from forebay.engine.watched_gradients import WatchedGradients
from forebay.optim.rule import float32
from forebay.plan.placement import UpdatePlace
from forebay.plan.zenflow import ZenFlow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from forebay.checkpoint.header import TensorSpec
    from forebay.checkpoint.sources import Source
    from forebay.engine.part import PartStorage
    from forebay.engine.policy import PolicyParts
    from forebay.engine.record import ParamRecord
    from forebay.engine.unit import Unit
    from forebay.plan.program import Program
    from forebay.tiers.device import DeviceArena

__all__ = ["ZenFlowUpdates"]


class ZenFlowUpdates(UpdatePolicy):
    """Acts on `ZenFlow`.

    Args:
        parts: What it is made from. Units whose state is on the device update there in every
            step, all of them.
    """

    def __init__(self, parts: PolicyParts) -> None:
        settings = parts.placement.policy
        assert isinstance(settings, ZenFlow)
        self._settings = settings
        self._parts = parts
        self._executor = parts.executor
        self._lanes = parts.executor.lanes
        self._units = [u for u in parts.units if u.placement.update is UpdatePlace.HOST]
        self._important: dict[PartStorage, ImportantColumns] = {}
        self._rest: dict[PartStorage, GatheredRest] = {}
        for unit in self._units:
            for part, records in zip(unit.parts, unit.records_of_part, strict=True):
                self._important[part] = ImportantColumns(
                    part, records, settings=settings, memory=parts.memory
                )
                buffers = 2 if settings.overlaps else 1
                self._rest[part] = GatheredRest(part, buffers=buffers, memory=parts.memory)
            unit.on_arrival = partial(self._show, unit)
        self._mine = {record.index for unit in self._units for record in unit.records}
        self._importance = Importance(
            settings,
            columns_of=lambda record: self._important[record.part].columns(record),
            is_wanted=lambda record: record.index in self._counts.wanted,
            device=parts.memory.device,
        )
        self._gradients = WatchedGradients(parts.executor.gradients, look=self._look)
        parts.executor.use(self._gradients)
        self._running: dict[int, RunningRest] = {}
        self._counts = ZenFlowCounts()
        # Parameters with an update of the rest that is not in force, on any rank.
        self._hidden: set[int] = set()
        # Weights of a checkpoint's masters that come into force with that.
        self._coming: dict[ParamRecord, torch.Tensor] = {}
        self._prepare_step()

    def _look(self, record: ParamRecord, value: Any) -> None:
        if record.index in self._mine:
            self._importance.look(record, value)

    def _prepare_step(self) -> None:
        """Before the next window's gradients come."""
        coming = self._counts.step + 1
        self._importance.is_active = not self._settings.warms_up(coming)
        if self._settings.selects(coming):
            self._counts.wanted |= self._mine

    def check(self, *, divisor: float) -> None:
        """A weight that the user wrote becomes a master: not while that is being updated."""
        del divisor
        if any(is_written(r) for unit in self._running_units() for r in unit.records):
            self._lanes.drain()

    def _running_units(self) -> Iterator[Unit]:
        return (self._parts.units[index] for index in self._running)

    def master_changed(self, record: ParamRecord) -> None:
        """See `UpdatePolicy`: the user's weight is newer than what is on its way."""
        if record.index in self._mine:
            self._important[record.part].master_changed(record)
        if record.unit in self._running:
            self._running[record.unit].changed.discard(record.index)
        self._coming.pop(record, None)

    def apply(self, program: Program, order: UpdateOrder) -> None:
        """See `UpdatePolicy`."""
        self._counts.step += 1
        if self._settings.warms_up(self._counts.step):
            self._executor.update_all(program, order)
        else:
            others = {i: at for i, at in order.hyper_of.items() if i not in self._mine}
            self._executor.update_all(program, UpdateOrder(order.hypers, others, order.scale))
            self._apply(self._in_order(program), order)
        self._prepare_step()

    def _in_order(self, program: Program) -> list[Unit]:
        """Units in the order in which the next forward needs them."""
        mine = {unit.index for unit in self._units}
        indices = dict.fromkeys(op.unit for op in program.updates if op.unit in mine)
        return [self._parts.units[index] for index in indices if index is not None]

    def _apply(self, units: Sequence[Unit], order: UpdateOrder) -> None:
        present = {
            unit.index: [r for r in unit.records if r.index in order.hyper_of] for unit in units
        }
        changed = {unit.index: {r.index for r in present[unit.index]} for unit in units}
        if self._settings.selects(self._counts.step):
            self._put_in_force(units, changed)
            for unit in units:
                self._parts.barrier.make_ready(unit)
        for unit in units:
            self._update_important(unit, present[unit.index], order)
        for unit in units:
            self._gather(unit, present[unit.index], order.scale)
        for record in [record for unit in units for record in present[unit.index]]:
            self._counts.count(record.index)
        self._counts.interval += 1
        if self._rest_is_due([r for unit in units for r in present[unit.index]], order.scale):
            self._put_in_force(units, changed)
            for unit in units:
                self._update_rest(unit)
            self._hidden = set(self._counts.gathered)
            self._counts.end_interval()
            if not self._settings.overlaps:
                self._put_in_force(units, changed)
        self._tell_ranks(units, changed)

    def _update_important(
        self, unit: Unit, records: Sequence[ParamRecord], order: UpdateOrder
    ) -> None:
        """Choose columns where that is due, and update them."""
        held = [record for record in records if record.segment.elements]
        looks = {r.index: self._importance.seen(r, self._gradients) for r in held}
        if any(look.is_choice for look in looks.values()):
            self._lanes.drain()
        for part in unit.parts:
            state = self._important[part]
            members = [record for record in held if record.part is part]
            part.await_readers()
            for record in members:
                if looks[record.index].is_choice:
                    state.choose(record, looks[record.index].columns)
            state.bring(members)
            grads = {record.index: looks[record.index].compact for record in members}
            state.update(grads, order, math=self._executor.math)
        self._counts.wanted.difference_update(record.index for record in records)
        unit.mark_changed(records)

    def _gather(self, unit: Unit, records: Sequence[ParamRecord], scale: float) -> None:
        for part in unit.parts:
            members = [r for r in records if r.part is part and self._has_rest(r)]
            self._rest[part].gather(members, scale=scale, lanes=self._lanes)

    def _has_rest(self, record: ParamRecord) -> bool:
        columns = self._important[record.part].columns(record)
        return columns is not None and not columns.are_all

    def _rest_is_due(self, present: Sequence[ParamRecord], scale: float) -> bool:
        settings = self._settings
        if settings.update_every is None:
            norms = self._importance.norms(present, tell=partial(tell_sharers, self._lanes))
            for index, (rest, important) in norms.items():
                self._counts.add_norms(index, rest=abs(scale) * rest, other=abs(scale) * important)
        if settings.updates_rest(self._counts.step):
            return True
        return settings.update_every is None and self._counts.are_ripe(settings.auto_ratio)

    def _update_rest(self, unit: Unit) -> None:
        """Update a unit's rest on the host with what is gathered."""
        running = RunningRest(tickets=[], used=[], changed=set())
        for part, records in zip(unit.parts, unit.records_of_part, strict=True):
            rest = self._rest[part]
            running.used.append(rest.arena)
            if not (due := [record for record in records if record.index in rest.counts]):
                running.tickets.append(None)
                continue
            # it runs over important columns too: their state must be here, not there
            self._important[part].bring(due)
            rest.take_means(due)
            hypers = self._parts.terms.capture(due, norm=0.0, ahead=0)
            gathered, ticket = part.ticket, None
            with part.gradient_in(rest.arena):
                for count in sorted(set(rest.counts.values())):
                    chosen = [r.index for r in due if rest.counts[r.index] == count]
                    of = {index: hypers.hyper_of[index] for index in chosen}
                    mean = UpdateOrder(hypers.hypers, of, float32(1.0 / count))
                    ticket = self._executor.update_part(part, records, mean)
            if self._settings.overlaps:
                # gradients may land, and gather in the other buffer, beside this update
                part.ticket = gathered
            running.changed |= set(rest.counts)
            running.tickets.append(ticket)
            rest.turn_over(ticket)
        if running.changed:
            self._running[unit.index] = running

    def _put_in_force(self, units: Sequence[Unit], changed: dict[int, set[int]]) -> None:
        """Send up the weights of updates of the rest that have run."""
        self._show_coming()
        for unit in units:
            changed[unit.index] |= self._hidden & {record.index for record in unit.records}
            running = self._running.pop(unit.index, None)
            if running is not None:
                # ranks may still be gathering its last weights, own slices included
                self._parts.barrier.make_ready(unit)
                self._publish(unit, running)
        self._hidden.clear()

    def _publish(self, unit: Unit, running: RunningRest) -> None:
        arenas = dict(zip(unit.parts, running.used, strict=True))
        before = [part.ticket for part in unit.parts]
        for part, records in zip(unit.parts, unit.records_of_part, strict=True):
            part.await_readers()
            # A reader has sent them home since: their weights are to be shown over what comes.
            self._important[part].bring([r for r in records if r.index in running.changed])
        with contextlib.ExitStack() as stack:
            for part, used in arenas.items():
                stack.enter_context(part.gradient_in(used))
            self._executor.publisher.publish(unit, running.tickets, running.changed)
        for part, earlier, ticket in zip(unit.parts, before, running.tickets, strict=True):
            if ticket is not None:
                self._rest[part].follow(arenas[part], part.ticket)
                # the publication followed the update alone, which may be older than what gathers
                part.ticket = self._lanes.hold(self._lanes.join([earlier, part.ticket]))
        if arrivals := self._executor.publisher.arrivals.pop(unit.index, []):
            for ticket in arrivals:
                self._lanes.accelerator.wait_for(ticket)
            self._show(unit)  # else whoever makes the unit ready does

    def _tell_ranks(self, units: Sequence[Unit], changed: dict[int, set[int]]) -> None:
        """Bring new weights to all ranks; in the program's order, as every rank does."""
        spread = self._executor.spread
        if spread is None:
            return
        for unit in units:
            records = [r for r in unit.records if r.index in changed[unit.index]]
            if records:
                spread(unit, records, [])

    def _show(self, unit: Unit) -> None:
        for part in unit.parts:
            self._important[part].show()

    def end_window(self) -> None:
        """See `UpdatePolicy`."""
        self._importance.forget()

    def forget_window(self) -> None:
        """See `UpdatePolicy`."""
        self._importance.forget()

    def plain_state(self) -> dict[str, Any] | None:
        """See `UpdatePolicy`."""
        return self._counts.plain({r.index: r.label for u in self._parts.units for r in u.records})

    def gathered(self, record: ParamRecord) -> Callable[[TensorSpec], Source] | None:
        """See `UpdatePolicy`: of parameters whose columns are chosen."""
        if record.index not in self._mine:
            return None
        columns = self._important[record.part].columns(record)
        if columns is None or columns.chosen is None:
            return None
        sums = self._rest[record.part].sums(record)
        return partial(GatheredSource, sums=sums, columns=columns, owner=record.unit)

    def restore(
        self,
        values: dict[str, Any] | None,
        gathered: Callable[[ParamRecord], torch.Tensor | None],
    ) -> None:
        """See `UpdatePolicy`; what another mode saved begins with a choice of columns."""
        records = [record for unit in self._parts.units for record in unit.records]
        self._running.clear()
        self._hidden.clear()
        indices = {record.label: record.index for record in records}
        self._counts = ZenFlowCounts.from_plain(values, indices) or ZenFlowCounts(
            step=max((record.step for record in records), default=0)
        )
        if self._settings.warms_up(self._counts.step + 1):
            self._counts = ZenFlowCounts(step=self._counts.step)
        for part in self._rest:
            self._rest[part].counts.clear()
        for record in [record for record in records if record.index in self._mine]:
            self._important[record.part].forget(record)
            found = gathered(record) if record.segment.elements else None
            if found is not None:
                self._take_gathered(record, found)
        self._prepare_step()

    def _take_gathered(self, record: ParamRecord, found: torch.Tensor) -> None:
        columns = columns_in(record, found, share=self._settings.topk_ratio)
        if columns is None:
            return  # saved by other slices: columns are chosen anew, and what they gathered is lost
        self._important[record.part].choose(record, columns)
        rest = self._rest[record.part]
        rest.sums(record).copy_(found.nan_to_num_(0.0))
        count = self._counts.gathered.get(record.index, 0)
        if count and not columns.are_all:
            rest.counts[record.index] = count

    def continues(self, values: dict[str, Any] | None) -> bool:
        """See `UpdatePolicy`: steps of the warm-up compute with what is newest."""
        return is_of_zenflow(values) and not self._settings.warms_up(self._counts.step + 1)

    def holds_back(self, record: ParamRecord) -> bool:
        """See `UpdatePolicy`."""
        return record.index in self._hidden

    def hold_back(self, record: ParamRecord, older: Callable[[], None]) -> None:
        """See `UpdatePolicy`: the newer weight waits on the host."""
        if record.index not in self._mine:
            return
        self._hidden.add(record.index)
        if record.segment.elements:
            part, held = record.part, record.segment
            self._coming[record] = part.own_weights[held.offset : held.end].to("cpu", copy=True)
            older()
            self._parts.units[record.unit].mark_changed([record])

    def _show_coming(self) -> None:
        coming, self._coming = self._coming, {}
        for record, weights in coming.items():
            record.part.await_readers()
            record.part.write_own_weights(record.segment.offset, weights)
            self._important[record.part].show()
            self._parts.units[record.unit].mark_changed([record])

    def finish(self, program: Program) -> None:
        """See `UpdatePolicy`: weights of the rest come into force before their time."""
        if self._running:
            self._parts.barrier.meet_readers()
        units = self._in_order(program)
        changed: dict[int, set[int]] = {unit.index: set() for unit in units}
        self._put_in_force(units, changed)
        self._tell_ranks(units, changed)

    def settle(self) -> None:
        """State goes home: all of it is the part's own after this."""
        for state in self._important.values():
            state.send_home()

    def idle_arenas(self) -> list[DeviceArena]:
        """See `UpdatePolicy`: compact state is copied anew from the parts' own."""
        return [arena for state in self._important.values() for arena in state.device_arenas]

    def rebind(self) -> None:
        """See `UpdatePolicy`."""
        for state in self._important.values():
            state.rebind()

    def close(self) -> None:
        """See `UpdatePolicy`."""
        for unit in self._units:
            unit.on_arrival = None
        for part in self._rest:
            self._rest[part].close()
            self._important[part].close()
