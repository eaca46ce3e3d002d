"""Figures of a run: lines of JSON, TensorBoard events, and progress on a terminal.

Everything goes to files and to stderr; stdout belongs to the command's result.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import statistics
from collections import deque
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from forebay.compat.api import CONFIG_LOG
from forebay.plan.words import ROLES
from forebay.units_of_measure import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from types import TracebackType

    from forebay.train.records import EvalRecord, StepRecord, Summary

__all__ = [
    "RunReporter",
    "bytes_by_tier",
    "logs_shown",
    "memory_lines",
    "summary_lines",
    "tier_line",
]

# Lines of progress in a run whose stderr is a file.
_LINES = 20
# Updates whose time says how long the rest will take: enough to even out, few enough to follow.
_RECENT = 50


class RunReporter:
    """Writes every record to the run's files and shows it.

    Args:
        console: Writes to stderr; a quiet one shows nothing.
        metrics: File of JSON lines, gone on with.
        tensorboard: Folder of event files, or None.
        total_steps: Updates in the run.
        every: Updates between lines where stderr is no terminal; None chooses.
        memory: Asked for the bytes by tier.

    Attributes:
        losses: First and last loss.
        eval_losses: (updates before it, loss) of every evaluation.
    """

    def __init__(
        self,
        console: Console,
        *,
        metrics: Path,
        tensorboard: Path | None,
        total_steps: int,
        every: int | None,
        memory: Callable[[], dict[str, dict[str, int]]],
    ) -> None:
        self._console = console
        self._total_steps = total_steps
        self._every = every or max(1, total_steps // _LINES)
        self._memory = memory
        self._file = metrics.open("a", encoding="utf-8")
        self._events = _open_events(tensorboard, console)
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self.losses: list[float] = []
        self.eval_losses: list[tuple[int, float]] = []
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if console.is_terminal and not console.quiet:
            columns = (BarColumn(bar_width=20), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("first step", total=total_steps)
            self._bar.start()

    def step(self, record: StepRecord) -> None:
        """Report an update."""
        values = record.as_dict()
        self._write(values)
        self._log("train", record.step, values)
        self._recent.append(record.seconds)
        self.losses[1:] = [record.loss]
        text = self._step_text(record)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=record.step, description=text)
        elif record.step % self._every == 0 or record.step in (1, self._total_steps):
            self.say(text)

    def evaluation(self, record: EvalRecord) -> None:
        """Report an evaluation."""
        values = record.as_dict()
        self._write(values)
        self._log("eval", record.step, {"loss": record.loss})
        self.eval_losses.append((record.step, record.loss))
        self.say(f"evaluation after {counted(record.step, 'update')}: loss {record.loss:.4f}")

    @property
    def recent_seconds(self) -> tuple[float, ...]:
        """Of the last updates, in order."""
        return tuple(self._recent)

    def say(self, text: str) -> None:
        """Show one line above the progress bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def remember(self, kept: Iterable[dict[str, Any]]) -> None:
        """Take over the lines of metrics of the run that goes on."""
        for record in kept:
            if "eval_loss" in record:
                self.eval_losses.append((record["step"], record["eval_loss"]))
            else:
                self.losses[1:] = [record["loss"]]

    def close(self) -> None:
        """End the progress bar and close the files. Idempotent."""
        if self._bar is not None:
            self._bar.stop()
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> RunReporter:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _step_text(self, record: StepRecord) -> str:
        left = statistics.fmean(self._recent) * (self._total_steps - record.step)
        norm = "-" if record.grad_norm is None else f"{record.grad_norm:.3g}"
        parts = (
            f"step {record.step}/{self._total_steps}",
            f"loss {record.loss:.4f}",
            f"{record.tokens / record.seconds:,.0f} tokens/s",
            f"norm {norm}",
            f"lr {record.learning_rate:.2e}",
            tier_line(self._memory()),
            f"{format_seconds(left)} left",
            "" if record.applied else "skipped: a gradient is not finite",
        )
        return "  ".join(part for part in parts if part)

    def _write(self, values: dict[str, Any]) -> None:
        # One write per line, flushed: what was measured survives whatever comes next.
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()

    def _log(self, group: str, step: int, values: dict[str, Any]) -> None:
        if self._events is None:
            return
        for name, value in values.items():
            if name != "step" and value is not None:
                self._events.add_scalar(f"{group}/{name}", float(value), step)


class _ConsoleHandler(logging.Handler):
    """Shows log records above the progress bar."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        kind = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        text = kind + record.getMessage()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def logs_shown(console: Console) -> Iterator[None]:
    """While open, forebay's log goes to the console and nowhere else.

    But for the configuration that the engine was given: the run shows its own.
    """
    logger, config = logging.getLogger("forebay"), logging.getLogger(CONFIG_LOG)
    handler, before = _ConsoleHandler(console), (logger.propagate, logger.level)
    shown, config.disabled = config.disabled, True
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate, logger.level = before
        config.disabled = shown


def bytes_by_tier(rows: Iterable[Any]) -> dict[str, dict[str, int]]:
    """Turns a ledger's rows into plain numbers by tier, then role.

    Example:
        >>> from forebay.tiers.ledger import LedgerRow, Role, Tier
        >>> bytes_by_tier([LedgerRow(Tier.HOST, Role.OPTIM_STATES, 8)])
        {'host': {'optim_states': 8}}
    """
    tiers: dict[str, dict[str, int]] = {}
    for row in rows:
        tiers.setdefault(row.tier.value, {})[row.role.value] = row.nbytes
    return tiers


def tier_line(tiers: dict[str, dict[str, int]]) -> str:
    """Bytes of each tier in one line."""
    return " ".join(f"{tier} {format_bytes(sum(roles.values()))}" for tier, roles in tiers.items())


def memory_lines(tiers: dict[str, dict[str, int]]) -> list[str]:
    """Bytes of each tier and role, a line each."""
    return [
        f"{tier:8}{_role(role):40}{format_bytes(nbytes):>12}"
        for tier, roles in tiers.items()
        for role, nbytes in roles.items()
    ]


def _role(role: str) -> str:
    """In words, and by the name that files and the ledger have for it."""
    return f"{ROLES[role]} ({role})" if role in ROLES else role


def summary_lines(summary: Summary) -> list[str]:
    """What a user wants to know at the end, a line each."""
    done = f"{summary.steps} of {counted(summary.total_steps, 'update')}"
    if summary.ended_by is not None:
        done += f", ended by {summary.ended_by}"
    if summary.skipped_steps:
        done += f", {summary.skipped_steps} of them skipped: a gradient was not finite"
    lines = [done]
    if summary.first_loss is not None and summary.last_loss is not None:
        lines.append(f"loss {summary.first_loss:.4f} -> {summary.last_loss:.4f}")
    if summary.eval_losses:
        first, last = summary.eval_losses[0], summary.eval_losses[-1]
        line = f"evaluation {first[1]:.4f} after {counted(first[0], 'update')}"
        lines.append(line if last is first else f"{line} -> {last[1]:.4f} after {last[0]}")
    speed = summary.tokens / summary.seconds if summary.seconds else 0.0
    lines.append(
        f"{summary.tokens:,} tokens in {format_seconds(summary.seconds)} ({speed:,.0f} tokens/s)"
    )
    memory = tier_line(summary.bytes_by_tier)
    if summary.device_peak_bytes is not None:
        memory += f", torch's peak on the device {format_bytes(summary.device_peak_bytes)}"
    lines.append(f"memory placed: {memory}")
    lines.append(f"model saved: {summary.model}")
    if summary.ended_by is not None:
        lines.append("to go on from here: the same command with --resume")
    return lines


def _open_events(folder: Path | None, console: Console) -> Any:
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        console.print(
            'no TensorBoard events: the package tensorboard is missing (pip install "forebay[train'
            ']")',
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return None
    return SummaryWriter(log_dir=str(folder))
