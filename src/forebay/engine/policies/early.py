"""Early updates: units that update while the window's last backward still runs.

Without clipping, loss scale and finiteness check nothing that only `step()` knows is needed, so a
unit's update may begin when its gradient is complete. It cannot be taken back. So a unit updates
early only after two windows in a row in which nothing came after that moment, and whatever comes
all the same closes the engine with one error.

[Note: what may come late] A parameter's AccumulateGrad runs once in a graph task, after every use
of the weight in it. What can still need a weight or bring an addend afterwards: another backward
before `step()`, reentrant checkpointing of a weight that several blocks share, a recomputation
that reads the weight without a gradient. New weights of units that the host updates go up after
backward, so what backward reads is old there by construction. Units updated on the device view NaN
until `step()`, and their version counters make graphs that still need the old values fail, as in
torch. (A view through `p.data` has a counter of its own: a graph that saved one of those reads new
weights if its node runs after the parameter's last gradient.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.engine.barrier import FAILED_HINT
from forebay.engine.masters import is_written, refresh_master
from forebay.engine.policies.steadiness import Steadiness
from forebay.engine.policy import UpdatePolicy
from forebay.errors import GradientError, TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.engine.barrier import Barrier
    from forebay.engine.executor import Executor
    from forebay.engine.record import ParamRecord
    from forebay.engine.terms import UpdateOrder, UpdateTerms
    from forebay.engine.unit import Unit
    from forebay.plan.program import Program

__all__ = ["EarlyUpdates"]

_HINT = (
    "updates run during backward since bf16.check_grad_overflow is false; set it to true to have "
    "them in step()"
)


class EarlyUpdates(UpdatePolicy):
    """Starts them, and refuses what cannot follow one.

    Args:
        units: Every unit by index.
        terms: Hyperparameters, captured when the last backward begins.
        executor: Carries out the updates.
        barrier: Told that weights are neither old nor new, from the first update to `step()`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        terms: UpdateTerms,
        executor: Executor,
        barrier: Barrier,
    ) -> None:
        self._units = units
        self._records = [record for unit in units for record in unit.records]
        self._terms = terms
        self._executor = executor
        self._barrier = barrier
        self._order: UpdateOrder | None = None
        self._steadiness = Steadiness(units)
        # Complete, and waiting for their state to come up.
        self._waiting: list[Unit] = []
        self._started: list[Unit] = []

    def begin_backward(self, program: Program, *, last: bool) -> None:
        """A backward brings its first gradient.

        Raises:
            GradientError: Units were updated by an earlier backward of this window.
        """
        self._refuse_if_started("another backward began before step()")
        self._steadiness.begin_backward()
        self._order = None
        if last and program.updates_early and self._terms.clip_norm is None:
            self._order = self._terms.capture(self._records, norm=0.0)

    def complete(self, program: Program, unit: Unit) -> None:
        """A unit's gradient of the window's last backward is complete, as far as known."""
        if not program.updates_with_gradient(unit.index) or not self._steadiness.complete(unit):
            return
        if self._order is not None and self._steadiness.is_steady(unit):
            self._waiting.append(unit)
        self._start_ready(program)

    def _start_ready(self, program: Program) -> None:
        waiting, self._waiting = self._waiting, []
        for unit in waiting:
            # waiting for an upload on the compute stream would hold up backward
            if unit.staging and not all(staged.ticket.done for staged in unit.staging):
                self._waiting.append(unit)
            else:
                self._start(program, unit)

    def _start(self, program: Program, unit: Unit) -> None:
        assert self._order is not None
        changed = [refresh_master(record) for record in unit.records]
        if any(changed):
            # what came up for the update is older; the gradient lands and the host updates
            unit.staging = None
            return
        on_device = unit.updates_on_device
        self._barrier.held = True
        self._started.append(unit)
        try:
            self._executor.update_early(program, unit, self._order)
        except RuntimeError as error:
            self._barrier.fail(str(error))
            raise TransferError(
                f"the update of unit {unit.name} failed: {error}", hint=FAILED_HINT
            ) from error
        unit.updated = True
        for record in unit.records:
            record.use_early()
        if on_device:
            unit.await_weights(unit.records, [], self._barrier.nans)

    def disturb(self, unit: Unit) -> None:
        """Something came for a unit after its gradient was complete.

        Raises:
            GradientError: The unit was updated already; the engine is closed.
        """
        self._steadiness.disturb(unit)
        if unit.updated:
            self._refuse_if_started(f"unit {unit.name} got a gradient after its last one")

    def spoiled(self, reason: str) -> None:
        """The window cannot be completed: what was updated cannot be taken back."""
        if self._started:
            self._barrier.fail(f"{reason}, and {self._updated()}")

    def check(self, *, divisor: float) -> None:
        """Refuse a `step()` that wants another update than the one that has begun.

        Raises:
            GradientError: Options changed since backward began (put them back and call `step()`
                again), or weights were written (the engine is closed).
        """
        self._waiting.clear()
        if not self._started:
            return
        order = self._order
        assert order is not None
        if self._terms.clip_norm is not None or divisor != 1.0:
            what = f"gradients divided by {divisor:g}" if divisor != 1.0 else "clipped gradients"
            raise GradientError(
                f"step() was asked for an update with {what}, but {self._updated()}", hint=_HINT
            )
        now = self._terms.capture(self._records, norm=0.0)
        if (now.hypers, now.hyper_of) != (order.hypers, order.hyper_of):
            raise GradientError(
                "the options of a parameter group (its learning rate, say) changed between the "
                f"window's last backward and step(), but {self._updated()}",
                hint="set them before the last backward, as they were to step() with now, or "
                "set bf16.check_grad_overflow to true",
            )
        written = next((r for unit in self._started for r in unit.records if is_written(r)), None)
        if written is not None:
            self._refuse_if_started(f"{written.label} was written before step()")
        self._barrier.held = False

    def apply(self, program: Program, order: UpdateOrder) -> None:
        """Update what has not begun; new weights of what has come into force."""
        self._executor.update_all(program, order)

    def refuse_discard(self) -> None:
        """Raise when the window's gradients are to be discarded, but some were used.

        Raises:
            GradientError: Call `step()` instead.
        """
        if self._started:
            raise GradientError(
                f"gradients cannot be discarded: {self._updated()}",
                hint=f"call step() first; {_HINT}",
            )

    def end_window(self) -> None:
        """The step is done: learn what can be relied upon in the next ones."""
        for unit in self._started:
            unit.updated = False
        self._started.clear()
        self._steadiness.end_window()
        self.forget_window()

    def forget_window(self) -> None:
        """A window begins."""
        self._steadiness.forget_window()
        self._waiting.clear()
        self._order = None

    def lost(self, record: ParamRecord) -> None:
        """The gradient of a parameter was cleared or replaced after its update.

        Raises:
            GradientError: Always; the engine is closed.
        """
        self._refuse_if_started(f"p.grad of {record.label} was cleared or replaced before step()")

    def _refuse_if_started(self, reason: str) -> None:
        if self._started:
            text = f"{reason}, but {self._updated()}"
            self._barrier.fail(text)
            raise GradientError(text, hint=f"go back to the last checkpoint; {_HINT}")

    def _updated(self) -> str:
        count = len(self._started)
        return f"{count} unit{'s' if count > 1 else ''} had been updated during backward"
