"""The speculative policy: host updates during backward, taken by the step or discarded.

When a unit's gradient has left, its update runs at once, as if nothing were to be clipped, into a
second state. The step takes that state where it decides on the same update, by changing pointers:
same gradient, same hyperparameters, factor 1. Else it updates in place as ever, so that the bits
are those of the exact policy, overflows included. The state that training has is never touched
before the step, so nothing that comes late is an error here; it costs a pass over the state.

A second state is more traffic of host memory than one that is updated in place: where backward is
too short to hide it, steps would be longer. That is tried and timed while training runs.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.engine.gradients import before_update
from forebay.engine.masters import is_written
from forebay.engine.policies.trial import Trial
from forebay.engine.policy import UpdatePolicy
from forebay.engine.spare_state import SpareState
from forebay.optim.clip import gradient_scale
from forebay.optim.flat_state import native_part
from forebay.plan.policy_bytes import speculates

if TYPE_CHECKING:
    from forebay.engine.part import PartStorage
    from forebay.engine.policy import PolicyParts
    from forebay.engine.record import ParamRecord
    from forebay.engine.terms import UpdateOrder
    from forebay.engine.unit import Unit
    from forebay.plan.policies import Speculative
    from forebay.plan.program import Program

__all__ = ["SpeculativeUpdates"]

_log = logging.getLogger("forebay")

# Steps that the share of clipped ones is taken of.
_RECENT = 16


@dataclass(slots=True)
class _Attempt:
    """One unit's update into the second state: what it was made with, and its tickets by part."""

    order: UpdateOrder
    tickets: list[Any]


class SpeculativeUpdates(UpdatePolicy):
    """Acts on `Speculative`.

    Args:
        parts: What it works with.
        policy: How often it may be in vain.

    Attributes:
        taken: Units whose update was taken, so far.
        discarded: Units whose update was made in vain, so far.
    """

    def __init__(self, parts: PolicyParts, *, policy: Speculative) -> None:
        self._parts = parts
        self._executor = parts.executor
        self._lanes = parts.executor.lanes
        self._terms = parts.terms
        self._most = policy.most_discarded
        self._records = [record for unit in parts.units for record in unit.records]
        self._ranks = parts.placement.sharding.size
        self._spares: dict[int, list[SpareState]] = {}
        for unit in parts.units:
            place = unit.placement
            if speculates(policy, update=place.update, weights=place.weights):
                memory = parts.memory
                self._spares[unit.index] = [SpareState(p, memory=memory) for p in unit.parts]
        self._natives: dict[tuple[int, ...], Any] = {}
        self._order: UpdateOrder | None = None
        self._attempts: dict[int, _Attempt] = {}
        # Units whose parameters all had a gradient in the last update.
        self._full: set[int] = set()
        self._clipped: deque[bool] = deque(maxlen=_RECENT)
        self._divisor = 1.0
        self._pauses = False
        self._trial = Trial()
        self.taken = self.discarded = 0
        parts.executor.on_departed = self._departed

    def begin_backward(self, program: Program, *, last: bool) -> None:
        """See `UpdatePolicy`: what has begun was not the whole gradient."""
        del program
        self._discard(*self._attempts)
        self._order = None
        if last and self._full and self._trial.uses and not self._pauses:
            scale = self._parts.options.loss_scale.value
            divisor = scale * self._ranks
            self._order = self._terms.capture(self._records, norm=0.0, divisor=divisor)

    def _departed(self, unit: Unit) -> None:
        """A unit's gradient is on its way to the host, where it is updated."""
        self._discard(unit.index)  # it left once more: something came late
        order = self._order
        if order is None or unit.index not in self._full or unit.updates_on_device:
            return
        if any(is_written(record) for record in unit.records):
            return
        tickets = []
        numbers = order.native(self._lanes.core)
        spares = self._spares[unit.index]
        for part, records, spare in zip(unit.parts, unit.records_of_part, spares, strict=True):
            native = self._native(part, spare)
            chosen = [order.hyper_of[record.index] for record in records]
            ticket = self._lanes.update(
                *(native, numbers, chosen, order.scale, self._parts.placement.piece_elements),
                *(None, before_update(part), 0, [], spare.source),
            )
            part.ticket = self._lanes.hold(ticket, native)
            tickets.append(ticket)
        self._attempts[unit.index] = _Attempt(order, tickets)

    def _native(self, part: PartStorage, spare: SpareState) -> Any:
        """The second state in the core's form, which is used again."""
        state = spare.flat
        key = (state.high.data_ptr(), state.exp_avg.data_ptr(), part.gradient_address)
        if key not in self._natives:
            self._natives[key] = native_part(
                self._lanes.core,
                state,
                grad=part.gradient_address,
                grad_dtype=part.gradient_dtype,
            )
        return self._natives[key]

    def disturb(self, unit: Unit) -> None:
        """See `UpdatePolicy`."""
        self._discard(unit.index)

    def master_changed(self, record: ParamRecord) -> None:
        """See `UpdatePolicy`."""
        self._discard(record.unit)

    def forget_window(self) -> None:
        """See `UpdatePolicy`."""
        self._discard(*self._attempts)
        self._order = None

    def _discard(self, *units: int) -> None:
        for index in units:
            self.discarded += self._attempts.pop(index, None) is not None

    def check(self, *, divisor: float) -> None:
        """See `UpdatePolicy`: what leaves from now on is updated by the step."""
        self._order = None
        self._divisor = divisor * self._parts.options.loss_scale.value * self._ranks

    def apply(self, program: Program, order: UpdateOrder) -> None:
        """Take what was made with this very order, make the rest."""
        taken = []
        for index, attempt in self._attempts.items():
            unit = self._parts.units[index]
            if _same(attempt.order, order, unit):
                for part, spare in zip(unit.parts, self._spares[index], strict=True):
                    part.await_readers()  # the next attempt writes into what it has now
                    spare.swap()
                    part.rounded_apart = spare.rounded
                self._executor.adopt(unit, list(attempt.tickets))
                taken.append(unit)
        self.taken += len(taken)
        self.discarded += len(self._attempts) - len(taken)
        self._attempts.clear()
        self._executor.update_all(program, order)
        for unit in taken:
            unit.updated = False
            for part in unit.parts:
                part.rounded_apart = None
        unclipped = gradient_scale(0.0, max_norm=self._terms.clip_norm, divisor=self._divisor)
        self._learn(clipped=abs(order.scale) != unclipped)
        self._full = {
            index
            for index in self._spares
            if all(r.index in order.hyper_of for r in self._parts.units[index].records)
        }

    def skip(self, program: Program) -> None:
        """See `UpdatePolicy`."""
        del program
        self._discard(*self._attempts)
        self._learn(clipped=True)

    def _learn(self, *, clipped: bool) -> None:
        self._clipped.append(clipped)
        count = sum(self._clipped)
        pauses = count > self._most * len(self._clipped)
        if pauses != self._pauses and len(self._clipped) == _RECENT:
            said = "pause, the exact ones run in step()" if pauses else "run again"
            _log.info(
                "speculative updates %s: %d of the last %d steps were clipped or skipped",
                *(said, count, len(self._clipped)),
            )
        self._pauses = pauses
        if pauses:
            self._trial.interrupt()
        elif self._trial.step():
            seconds = self._trial.seconds
            _log.info(
                "speculative updates %s: a step takes %.3f s with them, %.3f s without",
                "go on" if self._trial.uses else "pause, the exact ones run in step()",
                *(seconds[True], seconds[False]),
            )

    def close(self) -> None:
        """See `UpdatePolicy`."""
        self._executor.on_departed = None
        for spares in self._spares.values():
            for spare in spares:
                spare.close()
        self._spares.clear()
        self._natives.clear()


def _same(made: UpdateOrder, wanted: UpdateOrder, unit: Unit) -> bool:
    """Whether a unit's update was made as the step wants it."""
    if made.scale != wanted.scale:
        return False
    for record in unit.records:
        at = wanted.hyper_of.get(record.index)
        if at is None or wanted.hypers[at] != made.hypers[made.hyper_of[record.index]]:
            return False
    return True
