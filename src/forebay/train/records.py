"""What is known after an update or an evaluation, and how a run ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

__all__ = ["EvalRecord", "StepRecord", "Summary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One update.

    Attributes:
        step: Its number, from 1.
        loss: Mean over the label tokens of the window, before the update.
        learning_rate: Of the first parameter group, in this update.
        grad_norm: Global norm before clipping; None where nobody measured it.
        applied: False when a gradient was not finite and the whole update was skipped.
        tokens: Tokens of the window, padding left out.
        label_tokens: Those that are learned.
        seconds: Wall-clock time from the first forward to the decision on the update.
        epoch: Passes over the data so far.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float | None
    applied: bool
    tokens: int
    label_tokens: int
    seconds: float
    epoch: float

    def as_dict(self) -> dict[str, Any]:
        """One line of metrics.jsonl; floats are written so that they read back bit for bit."""
        return {
            "step": self.step,
            "loss": self.loss,
            "learning_rate": self.learning_rate,
            "grad_norm": self.grad_norm,
            "applied": self.applied,
            "tokens": self.tokens,
            "label_tokens": self.label_tokens,
            "tokens_per_second": self.tokens / self.seconds,
            "seconds": self.seconds,
            "epoch": self.epoch,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """One evaluation: mean loss per label token of the held-out rows after `step` updates."""

    step: int
    loss: float
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """One line of metrics.jsonl."""
        return {"step": self.step, "eval_loss": self.loss, "seconds": self.seconds}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a run ended.

    Attributes:
        steps: Updates made, skipped ones included.
        total_steps: Updates asked for.
        skipped_steps: Updates that changed nothing, since a gradient was not finite.
        ended_by: None at the last step, else the signal's name.
        parameters: Trainable ones.
        epoch: Where the next row is: passes over the data.
        row: Rows of that pass that are done.
        tokens: Tokens trained on, padding left out.
        seconds: Wall-clock time of training and evaluation.
        first_loss: Loss of the first update.
        last_loss: Loss of the last.
        eval_losses: (updates before it, loss) of every evaluation.
        bytes_by_tier: Bytes by tier, then role, at the end.
        device_peak_bytes: The most that torch held on the device; None on the CPU.
        output: The run's folder.
        model: The saved model's folder.
    """

    steps: int
    total_steps: int
    skipped_steps: int
    ended_by: str | None
    parameters: int
    epoch: int
    row: int
    tokens: int
    seconds: float
    first_loss: float | None
    last_loss: float | None
    eval_losses: tuple[tuple[int, float], ...]
    bytes_by_tier: dict[str, dict[str, int]] = field(default_factory=dict)
    device_peak_bytes: int | None = None
    output: str
    model: str

    @property
    def exit_code(self) -> int:
        """0 at the last step; else 128 and the signal's number, as shells count."""
        return 0 if self.ended_by is None else 128 + signal.Signals[self.ended_by]

    def as_dict(self) -> dict[str, Any]:
        """For summary.json and --json."""
        return {
            "steps": self.steps,
            "total_steps": self.total_steps,
            "skipped_steps": self.skipped_steps,
            "ended_by": self.ended_by,
            "parameters": self.parameters,
            "position": {"epoch": self.epoch, "row": self.row},
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
            "eval_losses": [{"step": step, "loss": loss} for step, loss in self.eval_losses],
            "bytes_by_tier": self.bytes_by_tier,
            "device_peak_bytes": self.device_peak_bytes,
            "output": self.output,
            "model": self.model,
        }
