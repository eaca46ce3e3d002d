"""The course of a window under DeepSpeed's rules: backwards in, one update out, counters moved.

It decides when an update is due and what it is divided by; the update itself is
`forebay.engine.Engine.step`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forebay.compat.flags import check_flags
from forebay.compat.progress import Update
from forebay.errors import GradientError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim.lr_scheduler import LRScheduler

    from forebay.compat.batches import MicroBatches
    from forebay.compat.progress import Progress
    from forebay.engine.engine import Engine
    from forebay.engine.optimizer import OffloadedOptimizer

__all__ = ["MicroSteps"]


class MicroSteps:
    """Drives an engine micro-step by micro-step.

    Calls: `backward` (or `scale`, and backward on its result), then `step`; `flush` at the end of
    the data; `discard` after a backward that raised.

    Args:
        core: The engine that does the work.
        optimizer: The optimizer over it.
        batches: Where windows end.
        scheduler: See below.
        progress: Told of every update.

    Attributes:
        scheduler: Stepped after every applied update; None for none.
        micro_steps: Calls of `step` so far.
        global_steps: Updates so far, skipped ones included.
        global_samples: Samples that they had.
        applied: Whether the last call of `step` changed the weights.
    """

    def __init__(
        self,
        core: Engine,
        *,
        optimizer: OffloadedOptimizer,
        batches: MicroBatches,
        scheduler: LRScheduler | None,
        progress: Progress,
    ) -> None:
        self._core = core
        self._optimizer = optimizer
        self._batches = batches
        self.scheduler = scheduler
        self._progress = progress
        self.micro_steps = 0
        self.global_steps = 0
        self.global_samples = 0
        self.applied = False
        self._has_backward = False
        # Backwards in the window when `scale` gave out a loss; whether one followed shows there.
        self._scaled_at: int | None = None

    def backward(self, loss: torch.Tensor, *, retain_graph: bool, divide: bool) -> None:
        """Backward of one micro-batch.

        Raises:
            GradientError: An earlier backward of this window raised.
        """
        check_flags("backward", retain_graph=retain_graph, scale_wrt_gas=divide)
        self._batches.refuse_alone()
        scaled = self._share(loss, divide=divide, last=self._batches.is_boundary)
        try:
            scaled.backward(retain_graph=retain_graph)
        except BaseException as error:
            reason = f"a backward raised {type(error).__name__}"
            self._core.collector.window.abandon_open(reason)
            raise
        self._has_backward = True

    def backward_together(
        self,
        losses: Sequence[Callable[[], torch.Tensor]],
        run: Callable[[Sequence[Callable[[], torch.Tensor]]], object],
        *,
        divide: bool,
    ) -> list[torch.Tensor]:
        """Backward of a window's micro-batches at once.

        Args:
            losses: What computes each one's loss.
            run: Runs forward and backward of what computes their shares.
            divide: Whether to divide by the accumulation steps.

        Returns:
            The losses, without their graphs.
        """
        found: list[torch.Tensor] = [torch.empty(0)] * len(losses)

        def _share(number: int) -> torch.Tensor:
            loss = losses[number]()
            scaled = self._share(loss, divide=divide, last=True)
            found[number] = loss.detach()
            return scaled

        run([partial(_share, number) for number in range(len(losses))])
        for _ in losses[1:]:
            self._end_micro_step()
        self._has_backward = True
        return found

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """What to call backward on by hand."""
        self._batches.refuse_alone()
        scaled = self._share(loss, divide=True, last=self._batches.is_boundary)
        self._scaled_at = self._core.collector.window.backwards
        return scaled

    def _share(self, loss: torch.Tensor, *, divide: bool, last: bool) -> torch.Tensor:
        if not isinstance(loss, torch.Tensor):
            raise UnsupportedError(
                f"the loss is of type {type(loss).__name__}, not a tensor",
                hint="pass what the model computed, before .item()",
            )
        self._core.collector.refuse_if_spoiled()
        self._core.collector.window.boundary = last
        steps = self._batches.per_update
        share = loss / steps if divide and steps > 1 else loss
        self._progress.add_loss(share)
        return self._optimizer.scale(share)

    @property
    def open_micro_steps(self) -> int:
        """Micro-steps since the last update."""
        return self._batches.done

    def step(self, lr_kwargs: dict[str, Any] | None) -> None:
        """End a micro-step; at the window's boundary, update and begin a new window.

        Raises:
            GradientError: No backward ran since the last step, or one raised.
            TransferError: A transfer failed; the engine is closed.
        """
        self.applied = False
        self._core.collector.refuse_if_spoiled()
        self._refuse_no_backward()
        if self._batches.is_boundary:
            self._update(divisor=1.0, lr_kwargs=lr_kwargs, open_steps=1)
        else:
            self._end_micro_step()

    def flush(self) -> None:
        """Update with a window that is not full; nothing where it is empty."""
        self._core.collector.refuse_if_spoiled()
        open_steps = int(self._has_backward)
        done = self._batches.done + open_steps
        if done:
            # Each addend was divided by the accumulation steps; a partial window has fewer.
            divisor = done / self._batches.per_update
            self._update(divisor=divisor, lr_kwargs=None, open_steps=open_steps)

    def discard(self) -> None:
        """Discard the window's gradients and begin it again."""
        self._optimizer.zero_grad()
        self._batches.done = 0
        self._has_backward, self._scaled_at = False, None
        self._progress.discard()

    def _refuse_no_backward(self) -> None:
        if self._has_backward:
            return
        if self._scaled_at is None:
            raise GradientError(
                "step() was called without a backward since the last step()",
                hint="call engine.backward(loss) before engine.step()",
            )
        if self._core.collector.window.backwards <= self._scaled_at:
            raise GradientError(
                "engine.scale(loss) was called, but no backward ran on what it returned",
                hint="engine.scale(loss).backward()",
            )

    def _end_micro_step(self) -> None:
        self._has_backward, self._scaled_at = False, None
        self._batches.done += 1
        self.micro_steps += 1

    def _update(self, *, divisor: float, lr_kwargs: dict[str, Any] | None, open_steps: int) -> None:
        # What governs this update; the schedule and the scale move on with it.
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        loss_scale = self._core.options.loss_scale.value
        self._optimizer.step_with(divisor=divisor)
        outcome = self._core.last_outcome
        self.applied = outcome is not None and outcome.applied
        for _ in range(open_steps):
            self._end_micro_step()
        self.global_samples += self._batches.samples
        self.global_steps += 1
        self._batches.done = 0
        self._optimizer.zero_grad()
        if self.scheduler is not None and self.applied:
            self.scheduler.step(**(lr_kwargs or {}))
        update = Update(
            step=self.global_steps,
            samples=self.global_samples,
            skipped=self._core.skipped_steps,
            rates=rates,
            norm=self._optimizer.last_grad_norm,
            loss_scale=loss_scale,
        )
        self._progress.update(update, divisor=divisor)
