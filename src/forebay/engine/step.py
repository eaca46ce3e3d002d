"""One optimizer step: seal, agree, then update everything or nothing.

Law 3: no update starts before the finiteness of all gradients is known, and a skipped step
changes no bit of weights, moments or step counts.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from forebay.engine.executor import UpdateOrder
from forebay.engine.options import OverflowCheck
from forebay.errors import UnsupportedError
from forebay.optim.clip import global_norm, gradient_scale

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.engine.collector import Collector
    from forebay.engine.executor import Executor
    from forebay.engine.options import EngineOptions
    from forebay.engine.record import ParamRecord
    from forebay.optim.rule import AdamRule, Hyper

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
        rule: How a parameter group becomes the numbers of an update.
        options: The loss scale that gradients carry, and what an overflow does.
        make_ready: Waits for the weights of a unit, by index.
    """

    def __init__(
        self,
        collector: Collector,
        *,
        executor: Executor,
        rule: AdamRule,
        options: EngineOptions,
        make_ready: Callable[[int], None],
    ) -> None:
        self._collector = collector
        self._units = collector.units
        self._executor = executor
        self._rule = rule
        self._loss_scale = options.loss_scale
        self._overflow = options.overflow
        self._make_ready = make_ready
        self._divisor = 1.0

    def agree(self) -> Agreement:
        """Norm, finiteness and presence of the sealed window."""
        present = self._collector.present()
        sums = self._executor.math.read()
        on_host = [r for r in present if r.index in self._executor.norm_on_host]
        sums.update(self._executor.host_square_sums(on_host))
        ordered = [sums[record.index] for record in present]
        bad = next(
            (r.index for r, s in zip(present, ordered, strict=True) if not math.isfinite(s)), None
        )
        return Agreement(
            norm=global_norm(ordered, divisor=self._divisor),
            first_bad=bad,
            present=frozenset(record.index for record in present),
        )

    def run(
        self,
        groups: Sequence[dict[str, object]],
        *,
        clip_norm: float | None,
        divisor: float = 1.0,
    ) -> StepOutcome:
        """Seal the window and update, or skip.

        Args:
            groups: The optimizer's groups as they are now.
            clip_norm: Bound on the global norm.
            divisor: What the gradients are too large by, beside the loss scale.

        Raises:
            GradientError: The window is spoiled or empty of new gradients.
        """
        collector = self._collector
        collector.seal()
        self._divisor = divisor * self._loss_scale.value
        agreement = self.agree()
        present = collector.present()
        if agreement.first_bad is not None and self._overflow is OverflowCheck.SKIP:
            outcome = self._skip(agreement)
            self._executor.drop_staged()
        else:
            order = self._capture(groups, present, agreement, clip_norm)
            self._apply(present, order)
            outcome = StepOutcome(applied=True, norm=agreement.norm)
            self._loss_scale.update(overflowed=False)
        for record in present:
            record.consume()
        self._executor.norm_on_host.clear()
        collector.window.reset()
        return outcome

    def _skip(self, agreement: Agreement) -> StepOutcome:
        assert agreement.first_bad is not None
        name = self._collector.records[agreement.first_bad].label
        before = self._loss_scale.value
        self._loss_scale.update(overflowed=True)
        _log.warning(
            "step skipped: the gradient of %s is not finite (loss scale %g, next %g)",
            name,
            before,
            self._loss_scale.value,
        )
        return StepOutcome(applied=False, norm=agreement.norm, bad_parameter=name)

    def _capture(
        self,
        groups: Sequence[dict[str, object]],
        present: Sequence[ParamRecord],
        agreement: Agreement,
        clip_norm: float | None,
    ) -> UpdateOrder:
        hypers: list[Hyper] = []
        place: dict[tuple[int, int], int] = {}
        hyper_of: dict[int, int] = {}
        for record in present:
            key = (record.group, record.step + 1)
            if key not in place:
                place[key] = len(hypers)
                hypers.append(self._rule.capture(groups[record.group], record.step + 1))
            hyper_of[record.index] = place[key]
        scale = gradient_scale(agreement.norm, max_norm=clip_norm, divisor=self._divisor)
        signs = {hyper.sign for hyper in hypers} or {1.0}
        if len(signs) > 1:
            raise UnsupportedError(
                "some parameter groups have maximize=True and others not",
                hint="negate the loss of one of them instead",
            )
        return UpdateOrder(hypers, hyper_of, scale * signs.pop())

    def _apply(self, present: Sequence[ParamRecord], order: UpdateOrder) -> None:
        for index in {record.unit for record in present}:
            self._make_ready(index)
        for record in self._collector.records:
            refresh_master(record)
        for record in present:
            record.step += 1
        updated = [r for r in present if self._units[r.unit].updates_on_device]
        self._executor.update_all(self._collector.program, order)
        torch.autograd.graph.increment_version([r.param for r in updated])
        for record in updated:
            record.version = record.param._version


def refresh_master(record: ParamRecord) -> None:
    """Take over a working weight that the user changed since its master last agreed with it.

    The weight becomes the master, unless a state dict brought a master for it.
    """
    param, part, slot = record.param, record.part, record.slot
    home = part.weight(slot)
    if record.pending:
        return
    moved = slot.elements > 0 and param.data_ptr() != home.data_ptr()
    if moved:  # the user assigned p.data
        with torch.no_grad():
            home.copy_(param.data)
        param.data = home
    if not moved and param._version == record.version:
        return
    if part.ticket is not None:
        part.ticket.wait()
    if record.master_is_loaded:
        if part.low is not None and part.on_host:
            part.view(part.high, slot).copy_(home)
        record.master_is_loaded = False
    elif part.high is not part.weights:
        part.set_master(slot, home)
    elif part.low is not None:
        part.view(part.low, slot).zero_()
    record.version = param._version
