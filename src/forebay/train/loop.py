"""The training loop: windows in, updates out, with the loss weighted by tokens.

The loss of a window is the sum of its token losses over its label tokens, whatever the number of
micro-batches, so accumulation trains as one large batch would. The division stands before
backward, and the engine is told not to divide again.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from forebay.data.batches import Position
from forebay.errors import BudgetError, GradientError
from forebay.train.evaluate import evaluate
from forebay.train.forward import forward
from forebay.train.records import EvalRecord, StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.data.batches import Batches, MicroBatch, Window
    from forebay.train.signals import StopSignals

__all__ = ["Engine", "Loop", "Reporter", "Silent"]


_DIVERGED: Final = "lower --lr, lengthen --warmup-steps, or train in bfloat16 or float32"


class Engine(Protocol):
    """What the loop asks of `forebay.initialize`'s engine.

    Calls per window: `backward_window`, which calls `__call__` through the loss of each
    micro-batch, then `step`, which updates. Between windows `get_lr` before and
    `get_global_grad_norm`, `was_step_applied` after the update; `eval` and `train` around an
    evaluation; `zero_grad` drops a window.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""

    def backward_window(
        self,
        batches: Sequence[MicroBatch],
        *,
        loss: Callable[[MicroBatch], torch.Tensor],
        scale_wrt_gas: bool,
    ) -> object:
        """Forward and backward of a window's micro-batches, in the order that is configured."""

    def step(self) -> None:
        """Update."""

    def zero_grad(self) -> None:
        """Discard the window's gradients."""

    def train(self) -> Any:
        """Set training mode."""

    def eval(self) -> Any:
        """Set evaluation mode."""

    def get_lr(self) -> list[float]:
        """Learning rate of each group."""

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last window's gradient before clipping."""

    def was_step_applied(self) -> bool:
        """Whether the last update changed the weights."""

    def mean_over_ranks(self, value: float) -> float:
        """The mean of a number over all ranks, which ask for it together."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""


class Reporter(Protocol):
    """Where figures go; called between updates."""

    def step(self, record: StepRecord) -> None:
        """An update was made, or skipped."""

    def evaluation(self, record: EvalRecord) -> None:
        """The held-out rows were evaluated."""


class Silent:
    """Reports nothing."""

    def step(self, record: StepRecord) -> None:
        """An update was made, or skipped."""

    def evaluation(self, record: EvalRecord) -> None:
        """The held-out rows were evaluated."""


@dataclass(slots=True, kw_only=True)
class Loop:
    """Trains until the last step or until asked to stop.

    Attributes:
        engine: Does the work.
        batches: Rows to train on.
        held_out: Rows to evaluate on, or None.
        device: Where the model computes.
        total_steps: Updates to make.
        eval_every: Updates between evaluations.
        save_every: Updates between saves; None saves none.
        save_seconds: Seconds between saves; None saves none.
        most_skips: Skipped updates in a row that end the run; None for no bound, where a loss
            scale is looking for its value.
        router_weight: Weight of a mixture of experts' own loss.
        reporter: Where figures go.
        stop: Asked after every update.
        save: Saves a checkpoint and the model.
        position: The next row.
        steps_done: Updates made, skipped ones included.
        tokens_done: Tokens trained on, padding left out.
        skips_in_a_row: Updates skipped since the last one that was applied.
        last_save: When the last save (or the run) began.
        is_stopping: A signal has reached this rank or another.
    """

    engine: Engine
    batches: Batches
    held_out: Batches | None
    device: torch.device
    total_steps: int
    eval_every: int
    save_every: int | None
    most_skips: int | None
    router_weight: float
    reporter: Reporter
    stop: StopSignals
    save: Callable[[], None]
    position: Position = field(default_factory=lambda: Position(0, 0))
    steps_done: int = 0
    tokens_done: int = 0
    skips_in_a_row: int = 0
    save_seconds: float | None = None
    last_save: float = field(default_factory=time.monotonic)
    is_stopping: bool = False

    def run(self) -> None:
        """Train; `steps_done` and `position` say how far it came.

        Raises:
            GradientError: A loss is not finite; the weights are those of the last update. Or no
                update of the whole run was applied.
            BudgetError: The device's memory ran out.
        """
        # A run that goes on was evaluated where it stopped only if an uninterrupted one is.
        if self.steps_done == 0 or self.steps_done % self.eval_every == 0:
            self._evaluate()
        self.is_stopping = self._is_true_somewhere(self.stop.is_requested())
        while self.steps_done < self.total_steps and not self.is_stopping:
            self._one_step()
            ended = self.steps_done == self.total_steps
            self.is_stopping = self._is_true_somewhere(self.stop.is_requested())
            if self.is_stopping:
                break
            if ended or self.steps_done % self.eval_every == 0:
                self._evaluate()
            if not ended and self._is_save_due():
                self.last_save = time.monotonic()
                self.save()
        if 0 < self.total_steps == self.skips_in_a_row:
            raise GradientError(
                f"all {self.total_steps} updates were skipped: no gradient was finite, and the "
                "model is what it was",
                hint="the loss scale is still too large: a smaller fp16.initial_scale_power, more "
                "--steps, or train in bfloat16",
            )

    @property
    def ended_by(self) -> str | None:
        """The signal that ended the run before its last step; None if none did."""
        if self.stop.requested is not None:
            return self.stop.requested.name
        return "SIGTERM" if self.is_stopping else None  # another rank heard it

    def _is_true_somewhere(self, here: bool) -> bool:  # noqa: FBT001
        """Signals and clocks tell ranks at different moments: all act after the same step."""
        return self.engine.mean_over_ranks(float(here)) > 0

    def _is_save_due(self) -> bool:
        if self.save_seconds is not None:
            return self._is_true_somewhere(time.monotonic() - self.last_save >= self.save_seconds)
        return self.save_every is not None and self.steps_done % self.save_every == 0

    def _one_step(self) -> None:
        began = time.monotonic()
        window = self.batches.window(self.position)
        learning_rate = self.engine.get_lr()[0]
        try:
            loss = self._train(window)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"step {self.steps_done + 1} ran out of device memory: "
                f"{str(error).partition('. ')[0]}",
                hint="a smaller --batch-size (with more --accumulation), or "
                "--gradient-checkpointing",
            ) from error
        self.position = window.following
        self.steps_done += 1
        self.tokens_done += window.tokens
        seconds = time.monotonic() - began
        self.reporter.step(
            StepRecord(
                step=self.steps_done,
                loss=loss,
                learning_rate=learning_rate,
                grad_norm=self.engine.get_global_grad_norm(),
                applied=self.engine.was_step_applied(),
                tokens=window.tokens,
                label_tokens=window.label_tokens,
                seconds=seconds,
                epoch=self.position.epoch + self.position.row / self.batches.num_rows,
            )
        )
        self._count_skips()

    def _count_skips(self) -> None:
        self.skips_in_a_row = 0 if self.engine.was_step_applied() else self.skips_in_a_row + 1
        if self.most_skips is not None and self.skips_in_a_row >= self.most_skips:
            raise GradientError(
                f"{self.skips_in_a_row} updates in a row were skipped, the last at step "
                f"{self.steps_done} of {self.total_steps}: their gradients are not finite",
                hint=_DIVERGED,
            )

    def _train(self, window: Window) -> float:
        """Forward and backward of all micro-batches, then the update; returns the window's loss."""
        total = torch.zeros((), device=self.device)
        # The engine averages over ranks; the window's tokens are those of all of them.
        share = window.label_tokens / self.engine.world_size

        def _loss(batch: MicroBatch) -> torch.Tensor:
            result = forward(
                self.engine, batch, device=self.device, router_weight=self.router_weight
            )
            loss = result.loss_sum / share
            total.add_(loss.detach())
            if result.router_loss is not None:
                loss = loss + result.router_loss * (batch.label_tokens / share)
            return loss

        self.engine.backward_window(window.micro_batches, loss=_loss, scale_wrt_gas=False)
        loss_value = self.engine.mean_over_ranks(float(total))
        self._refuse_nan(loss_value)
        self.engine.step()
        return loss_value

    def _refuse_nan(self, loss: float) -> None:
        if math.isfinite(loss):
            return
        # Drops the gradients: the weights stay those of the update before.
        self.engine.zero_grad()
        raise GradientError(
            f"the loss is {loss} at step {self.steps_done + 1} of {self.total_steps}; no weight "
            "was changed by it",
            hint=_DIVERGED,
        )

    def _evaluate(self) -> None:
        if self.held_out is None:
            return
        began = time.monotonic()
        loss = evaluate(self.engine, self.held_out, device=self.device)
        if not math.isfinite(loss):
            raise GradientError(
                f"the evaluation loss is {loss} after {self.steps_done} of {self.total_steps} "
                "updates",
                hint="lower --lr" if self.steps_done else "check the model's weights",
            )
        self.reporter.evaluation(
            EvalRecord(step=self.steps_done, loss=loss, seconds=time.monotonic() - began)
        )
