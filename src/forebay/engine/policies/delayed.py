"""The delayed policy: a step's update has all of the next step, and comes into force after it.

With x(j) the masters after j updates and w(k) the weights that the gradient of step k was computed
with, x(k+1) = update(x(k), gradient at w(k)) and w(k+1) = x(k) rounded, where exact has x(k+1): the
staleness is exactly one (the delayed parameter update of ZeRO-Offload, arXiv:2101.06840, sec. 5).

[Note: two landing places] The gradient of a step is being used while the next one lands, so each
part has two landing places and they take turns. Where masters are whole, new weights lie over the
gradient they came from; they leave from there one step later, before a gradient lands there again.

[Note: state on the device] There the update runs at once, on a whole master beside the weights,
which become that master, rounded, in the next step: all weights come into force together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forebay.engine.masters import is_written, refresh_master
from forebay.engine.policy import UpdatePolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.engine.executor import HeldUpdates
    from forebay.engine.policy import PolicyParts
    from forebay.engine.record import ParamRecord
    from forebay.engine.terms import UpdateOrder
    from forebay.plan.policies import Delayed
    from forebay.plan.program import Program

__all__ = ["DelayedUpdates"]


class DelayedUpdates(UpdatePolicy):
    """Holds a step's new weights back until the next step.

    A step that is skipped brings those of the step before into force all the same, and holds none.

    Args:
        parts: What it works with.
        policy: How many updates are exact first.
    """

    def __init__(self, parts: PolicyParts, *, policy: Delayed) -> None:
        self._executor = parts.executor
        self._barrier = parts.barrier
        self._warm_up = policy.warm_up_steps
        self._units = parts.units
        self._records = [record for unit in parts.units for record in unit.records]
        self._parts = [part for unit in parts.units for part in unit.parts]
        # What is updated on the device uses its gradient at once.
        self._landing = [part for part in self._parts if part.on_host]
        self._held: HeldUpdates | None = None
        self._spread = parts.executor.spread
        # Weights of a checkpoint's masters that come into force with the next step.
        self._coming: dict[ParamRecord, torch.Tensor] = {}

    def apply(self, program: Program, order: UpdateOrder) -> None:
        """See `UpdatePolicy`; the number of updates so far is the largest step count."""
        self.finish(program)
        held = self._executor.update_behind(program, order)
        if max(record.step for record in self._records) <= self._warm_up:
            self._executor.come_into_force(program, held)
            return
        self._held = held
        self._turn_over()

    def skip(self, program: Program) -> None:
        """See `UpdatePolicy`."""
        self.finish(program)

    def finish(self, program: Program) -> None:
        """What was held comes into force, but for weights that the user has written meanwhile."""
        if self._held is not None or self._coming:
            self._barrier.meet_readers()
        for record in self._records:
            if is_written(record):
                refresh_master(record)
        self._show_coming()
        held, self._held = self._held, None
        if held is None:
            return
        for unit in self._units:
            # else what is still being gathered over ranks would be written over what comes now
            self._barrier.make_ready(unit)
        # see [Note: two landing places]
        self._turn_over()
        for part in self._parts:
            part.await_readers()
        self._executor.come_into_force(program, held)
        for part in self._landing:
            if part.ticket is not None:
                part.loads.append(part.ticket)  # the next update changes what this one sends up
        self._turn_over()

    def _turn_over(self) -> None:
        for part in self._landing:
            part.turn_over()

    def continues(self, values: dict[str, Any] | None) -> bool:
        """See `UpdatePolicy`: no other mode without values of its own has weights in force."""
        return values is None

    def holds_back(self, record: ParamRecord) -> bool:
        """See `UpdatePolicy`."""
        held = self._held is not None and record.index in self._held.order.hyper_of
        return held or record in self._coming

    def hold_back(self, record: ParamRecord, older: Callable[[], None]) -> None:
        """See `UpdatePolicy`: the newer weight waits on the host."""
        if record.slot.elements:
            self._coming[record] = record.part.stored(record.slot).to("cpu", copy=True)
            older()
            torch.autograd.graph.increment_version([record.param])
            record.version = record.param._version

    def _show_coming(self) -> None:
        coming, self._coming = self._coming, {}
        for record, weight in coming.items():
            record.part.await_readers()
            record.part.store(record.slot, weight)
            torch.autograd.graph.increment_version([record.param])
            record.version = record.param._version
        if self._spread is not None and coming:
            units = {record.unit for record in coming}
            for unit in (unit for unit in self._units if unit.index in units):
                self._spread(unit, [r for r in unit.records if r in coming], [])

    def master_changed(self, record: ParamRecord) -> None:
        """See `UpdatePolicy`: that weight is what is in force."""
        self._coming.pop(record, None)
        if self._held is not None:
            self._held.order.hyper_of.pop(record.index, None)
