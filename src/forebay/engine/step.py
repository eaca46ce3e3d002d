"""One optimizer step: seal, agree, then update everything or nothing.

Law 3: no update starts before the finiteness of all gradients is known, and a skipped step
changes no bit of weights, moments or step counts.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.engine.barrier import FAILED_HINT
from forebay.engine.masters import refresh_master
from forebay.engine.options import OverflowCheck, Timing
from forebay.engine.reads import EarlyReads
from forebay.errors import ForebayError, RankError, TransferError
from forebay.links.observer import Moment
from forebay.optim.clip import global_norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.engine.barrier import Barrier
    from forebay.engine.collector import Collector
    from forebay.engine.executor import Executor
    from forebay.engine.options import EngineOptions
    from forebay.engine.record import ParamRecord
    from forebay.engine.terms import UpdateOrder, UpdateTerms

__all__ = ["Agreement", "StepOutcome", "Stepper"]

_log = logging.getLogger("forebay")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What all ranks know before anything changes: the one exchange per update.

    Attributes:
        norm: Global norm of the averaged, unscaled gradient.
        first_bad: Index of the first parameter whose gradient is not finite; None when all are.
        present: Indices of the parameters that have a gradient on some rank.
    """

    norm: float
    first_bad: int | None
    present: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step did.

    Attributes:
        applied: Whether weights change; False when the step was skipped.
        norm: Global gradient norm before clipping.
        bad_parameter: Name of the first parameter whose gradient was not finite.
    """

    applied: bool
    norm: float
    bad_parameter: str | None = None


class Stepper:
    """Runs steps.

    Args:
        collector: Where the window's gradients are.
        executor: Carries out the updates.
        terms: What updates are made with.
        options: The loss scale that gradients carry, and what an overflow does.
        barrier: Closes the engine when an update fails.
    """

    def __init__(
        self,
        collector: Collector,
        *,
        executor: Executor,
        terms: UpdateTerms,
        options: EngineOptions,
        barrier: Barrier,
    ) -> None:
        self._collector = collector
        self._units = collector.units
        self._executor = executor
        self._departure = collector.departure
        self._terms = terms
        self._loss_scale = options.loss_scale
        self._overflow = options.overflow
        self._policy = collector.policy
        self._barrier = barrier
        self._divisor = 1.0
        # Updates are being enqueued: an exception now leaves some done and some not.
        self._applying = False
        self._early_reads = EarlyReads(deferred=options.timing is Timing.DEFERRED)
        self._away = [unit.name for unit in self._units if unit.streams_weights]
        self._has_said_why = False

    def agree(self) -> Agreement:
        """Norm, finiteness and presence of the sealed window."""
        with self._executor.waiting("norm"):
            sums = self._departure.square_sums(self._collector.present())
        self._executor.mark(Moment.AGREED)
        present = [self._collector.records[index] for index in sorted(sums)]
        ordered = [sums[record.index] for record in present]
        bad = next(
            (r.index for r, s in zip(present, ordered, strict=True) if not math.isfinite(s)), None
        )
        return Agreement(
            norm=global_norm(ordered, divisor=self._divisor),
            first_bad=bad,
            present=frozenset(record.index for record in present),
        )

    def run(self, *, divisor: float = 1.0) -> StepOutcome:
        """Seal the window and update, or skip.

        A failure inside the lanes, or in the middle of an update, closes the engine.

        Args:
            divisor: What the gradients are too large by, beside the loss scale.

        Raises:
            GradientError: The window is spoiled or empty of new gradients.
            TransferError: A transfer or update failed; the engine is closed.
        """
        try:
            self._executor.lanes.raise_failures()
            return self._seal_and_decide(divisor)
        except (TransferError, RankError) as error:
            self._barrier.fail(str(error))
            raise
        except BaseException as error:
            foreign = isinstance(error, RuntimeError) and not isinstance(error, ForebayError)
            if foreign or self._applying:
                self._barrier.fail(f"{type(error).__name__} {error}")
            if foreign:
                raise TransferError(f"the step failed: {error}", hint=FAILED_HINT) from error
            raise

    def _seal_and_decide(self, divisor: float) -> StepOutcome:
        self._take_over_weights()
        self._collector.seal()
        self._divisor = divisor * self._loss_scale.value * self._departure.ranks
        try:
            return self._decide()
        except BaseException as error:
            self._collector.window.spoil(f"step() raised {type(error).__name__}")
            raise

    def _take_over_weights(self) -> None:
        """Whatever the user changed since the last step, before anything of this one is final."""
        self._terms.validate()
        for unit in self._units:
            if any(record.param.grad is not None for record in unit.records):
                self._barrier.make_ready(unit)
        for record in self._collector.records:
            refresh_master(record)

    def _decide(self) -> StepOutcome:
        agreement = self.agree()
        self._barrier.nans.check()
        present = [self._collector.records[index] for index in sorted(agreement.present)]
        if agreement.first_bad is not None and self._overflow is OverflowCheck.SKIP:
            bad = self._collector.records[agreement.first_bad].label
            self._early_reads.note(finite=False, applied=False, bad=bad)
            outcome = StepOutcome(applied=False, norm=agreement.norm, bad_parameter=bad)
            self._policy.skip(self._collector.program)
            self._executor.drop_staged()
        else:
            order = self._terms.capture(present, norm=agreement.norm, divisor=self._divisor)
            self._apply(present, order)
            self._early_reads.note(finite=agreement.first_bad is None, applied=True)
            outcome = StepOutcome(applied=True, norm=agreement.norm)
        for record in present:
            record.consume()
        self._executor.gradients.forget()
        self._departure.window_ended()
        self._collector.end_window()
        return outcome

    def conclude(self, outcome: StepOutcome) -> None:
        """Tell the loss scale and the log how a step ended.

        Raises:
            GradientError: A gradient overflowed though the loss scale is at its minimum.
        """
        before = self._loss_scale.value
        try:
            self._loss_scale.update(overflowed=not outcome.applied)
        finally:
            if not outcome.applied:
                _log.warning(
                    "step skipped: the gradient of %s is not finite (loss scale %g, next %g)",
                    outcome.bad_parameter,
                    before,
                    self._loss_scale.value,
                )
            # an overflow under a loss scale is another matter
            if self._away and before == 1.0 and not outcome.applied and not self._has_said_why:
                self._has_said_why = True
                _log.warning(
                    "if the loss is NaN too, and else would not be: weights that are not always on "
                    "the device (%s, ...) show NaN unless their module is asked. For all at once "
                    "(a penalty, a norm) go over model.state_dict(), or read them inside "
                    "forebay.zero.GatheredParameters; of one kept in a list or a closure declare "
                    "the reader, forebay.zero.register_external_parameter(module, weight); in an "
                    "autograd.Function save it with ctx.save_for_backward, not on ctx",
                    self._away[0],
                )

    def _apply(self, present: Sequence[ParamRecord], order: UpdateOrder) -> None:
        self._applying = True
        for record in present:
            record.step += 1
        self._policy.apply(self._collector.program, order)
        self._applying = False
