"""The delayed policy: a step's update has all of the next step, and comes into force after it.

With x(j) the masters after j updates and w(k) the weights that the gradient of step k was computed
with, x(k+1) = update(x(k), gradient at w(k)) and w(k+1) = x(k) rounded, where exact has x(k+1): the
staleness is exactly one (the delayed parameter update of ZeRO-Offload, arXiv:2101.06840, sec. 5).

[Note: two landing places] The gradient of a step is being used while the next one lands, so each
part has two landing places and they take turns. Where masters are whole, new weights lie over the
gradient they came from; they leave from there one step later, before a gradient lands there again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.engine.policy import UpdatePolicy

if TYPE_CHECKING:
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
        self._warm_up = policy.warm_up_steps
        self._records = [record for unit in parts.units for record in unit.records]
        self._parts = [part for unit in parts.units for part in unit.parts]
        self._held: HeldUpdates | None = None

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
        """What was held comes into force."""
        held, self._held = self._held, None
        if held is None:
            return
        # see [Note: two landing places]
        self._turn_over()
        for part in self._parts:
            part.await_readers()
        self._executor.come_into_force(program, held)
        for part in self._parts:
            if part.ticket is not None:
                part.loads.append(part.ticket)  # the next update changes what this one sends up
        self._turn_over()

    def _turn_over(self) -> None:
        for part in self._parts:
            part.turn_over()

    def master_changed(self, record: ParamRecord) -> None:
        """See `UpdatePolicy`: that weight is what is in force."""
        if self._held is not None:
            self._held.order.hyper_of.pop(record.index, None)
