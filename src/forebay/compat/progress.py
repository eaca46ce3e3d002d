"""What an engine tells of its updates: a line every so many, and TensorBoard's scalars.

`steps_per_print` and the `tensorboard` section act here. Nothing is measured; a loss is read
after `step()`, which has waited for the gradient norm anyway.
"""

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from forebay.config.resolved import TensorBoardSpec

__all__ = ["Progress", "Update", "events_folder", "open_events"]

_log = logging.getLogger("forebay")


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One update, applied or skipped.

    Attributes:
        step: Its number, from 1 on.
        samples: Samples trained on so far.
        skipped: Updates skipped so far.
        rates: The learning rates that governed it, by group.
        norm: Global gradient norm before clipping.
        loss_scale: The loss scale that governed it.
    """

    step: int
    samples: int
    skipped: int
    rates: list[float]
    norm: float | None
    loss_scale: float


class Progress:
    """Reports updates.

    Args:
        every: Updates between two lines; None writes none.
        events: TensorBoard's writer, or None.
        has_loss_scale: Whether losses are scaled, so that the scale is worth telling.
        mean: The mean over ranks, which all of them ask for together.
        speaks: Whether this is the rank that writes lines.
    """

    def __init__(
        self,
        *,
        every: int | None,
        events: Any = None,
        has_loss_scale: bool = False,
        mean: Callable[[float], float] | None = None,
        speaks: bool = True,
    ) -> None:
        self._mean = mean
        self._speaks = speaks
        self._every = every
        self._events = events
        self._has_loss_scale = has_loss_scale
        self._loss: torch.Tensor | None = None

    def add_loss(self, loss: torch.Tensor) -> None:
        """One micro-batch's share of the window's loss; it stays on its device."""
        if self._every is None and self._events is None:
            return
        share = loss.detach().float().mean()
        self._loss = share if self._loss is None else self._loss + share

    def discard(self) -> None:
        """The window was discarded."""
        self._loss = None

    def update(self, update: Update, *, divisor: float) -> None:
        """Report an update.

        Args:
            update: What to tell.
            divisor: What the window's loss is too large by, beside its shares.
        """
        total, self._loss = self._loss, None
        due = self._every is not None and update.step % self._every == 0
        loss = None if total is None else float(total) / divisor
        if due and loss is not None and self._mean is not None:
            loss = self._mean(loss)
        if due and self._speaks:
            _say(self._line(update, loss))
        if self._events is not None:
            self._write(update, loss)

    def close(self) -> None:
        """Close the events file. Idempotent."""
        if self._events is not None:
            self._events.close()

    def _write(self, update: Update, loss: float | None) -> None:
        for name, value in (
            ("train_loss", loss),
            ("lr", update.rates[0] if update.rates else None),
            ("loss_scale", update.loss_scale if self._has_loss_scale else None),
            ("grad_norm", update.norm),
        ):
            if value is not None:
                self._events.add_scalar(f"Train/Samples/{name}", value, update.samples)
        # A script may end without closing the engine, and the writer's thread would die with it.
        self._events.flush()

    def _line(self, update: Update, loss: float | None) -> str:
        rates = ", ".join(f"{rate:.4g}" for rate in update.rates)
        norm = "-" if update.norm is None else f"{update.norm:.4g}"
        parts = [f"step={update.step}", f"skipped={update.skipped}", f"lr=[{rates}]"]
        if loss is not None:
            parts.append(f"loss={loss:.4f}")
        parts.append(f"norm={norm}")
        if self._has_loss_scale:
            parts.append(f"loss_scale={update.loss_scale:g}")
        return ", ".join(parts)


def events_folder(spec: TensorBoardSpec) -> Path:
    """Make the folder of event files, before anything costly is done.

    Raises:
        ConfigError: tensorboard is not installed, or the folder cannot be written.
    """
    try:
        importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise ConfigError(
            "config key tensorboard.enabled is true, and the package tensorboard is not installed",
            hint="pip install tensorboard, or delete the section",
        ) from error
    folder = Path(spec.output_path or "runs") / spec.job_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"config keys tensorboard.output_path and job_name name {folder}, which cannot be "
            f"written: {error.strerror}",
            hint="write the path of a folder that you may write to",
        ) from error
    return folder


def open_events(folder: Path) -> Any:
    """A writer of events below `folder`."""
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
    return writer(log_dir=str(folder))


def _say(line: str) -> None:
    """Through logging where someone listens there, else to stderr.

    Without any set-up Python's logging drops what is no warning. Whoever gave the logger
    "forebay" a level above INFO wants silence.
    """
    if _log.isEnabledFor(logging.INFO) and _log.hasHandlers():
        _log.info(line)
    elif _log.level <= logging.INFO:
        sys.stderr.write(line + "\n")
