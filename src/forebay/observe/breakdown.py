"""Where a step's time went, in DeepSpeed's words and ours: `wall_clock_breakdown`.

DeepSpeed's timers wait for the device at every phase; these numbers come from a `StepRecord`,
which waits for nothing.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from forebay.observe.reasons import verdict
from forebay.plan.timeline import Interval, Row, overlap_seconds, union

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from forebay.observe.records import StepRecord

__all__ = ["Breakdown", "BreakdownLog", "break_down", "mean_of", "say"]

_log = logging.getLogger("forebay")


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Seconds, bytes and rates of one step, or their means.

    Phases are on the compute stream's clock, waits included.

    Attributes:
        step_seconds: From the first forward to the next step's.
        fwd: All forwards.
        bwd: All backwards.
        bwd_inner: Backwards without waits.
        bwd_allreduce: Sums over ranks; 0 in one process.
        bwd_other: Waits inside backwards, for gradients to leave.
        step: Calls of `step()`.
        optim_step: From the clip factor to the last new weight or state at home; most of it
            runs beside the next forward.
        allgather: Gathering weights over ranks; 0 in one process.
        reduce_scatter: Summing gradients over ranks; 0 in one process.
        exposed_wait: What the compute stream stood still.
        up_bytes: To the device.
        down_bytes: To the host.
        up_busy: Seconds in which the link up had work.
        down_busy: Seconds in which the link down had work.
        host_busy: Seconds in which the update's threads had work.
        wait_on_up: Exposed waiting while the link up worked.
        wait_on_down: Exposed waiting while the link down worked.
        wait_on_host: Exposed waiting while the update's threads worked.
        wait_on_read: Exposed waiting while state came from files.
        wait_on_write: Exposed waiting while state went to files.
        weights_in_time: Uses of weights that live on the host and were fetched ahead.
        weights_late: Uses of weights that were not.
        gathers_uneven: Gathers of units that some ranks needed when others did not.
    """

    step_seconds: float
    fwd: float
    bwd: float
    bwd_inner: float
    bwd_allreduce: float
    bwd_other: float
    step: float
    optim_step: float
    allgather: float
    reduce_scatter: float
    exposed_wait: float
    up_bytes: float
    down_bytes: float
    up_busy: float
    down_busy: float
    host_busy: float
    wait_on_up: float
    wait_on_down: float
    wait_on_host: float
    wait_on_read: float
    wait_on_write: float
    weights_in_time: float = 0.0
    weights_late: float = 0.0
    gathers_uneven: float = 0.0

    @property
    def up_gb_per_second(self) -> float:
        """While it was busy."""
        return self.up_bytes / self.up_busy / 1e9 if self.up_busy else 0.0

    @property
    def down_gb_per_second(self) -> float:
        """While it was busy."""
        return self.down_bytes / self.down_busy / 1e9 if self.down_busy else 0.0

    def line(self, head: str) -> str:
        """One line under DeepSpeed's names, milliseconds; then the links."""
        names = ("fwd", "bwd", "bwd_inner", "bwd_allreduce", "bwd_other", "step", "optim_step")
        more = ("allgather", "reduce_scatter", "exposed_wait")
        parts = [f"{head} time (ms)", f"total: {self.step_seconds * 1e3:.2f}"]
        parts += [f"{name}: {getattr(self, name) * 1e3:.2f}" for name in (*names, *more)]
        parts += [
            f"up: {self.up_bytes / 1e9:.3f} GB at {self.up_gb_per_second:.1f} GB/s",
            f"down: {self.down_bytes / 1e9:.3f} GB at {self.down_gb_per_second:.1f} GB/s",
        ]
        uses = self.weights_in_time + self.weights_late
        if uses:
            parts.append(f"weights in time: {100 * self.weights_in_time / uses:.1f}% of {uses:.0f}")
        if self.gathers_uneven:
            parts.append(f"gathers not all ranks needed: {self.gathers_uneven:.0f}")
        return " | ".join(parts)

    def sentence(self) -> str:
        """What bounds the step and what would help."""
        return verdict(
            step=self.step_seconds,
            exposed=self.exposed_wait,
            on={
                Row.HOST_UPDATE: self.wait_on_host,
                Row.UP: self.wait_on_up,
                Row.DOWN: self.wait_on_down,
                Row.READ: self.wait_on_read,
                Row.WRITE: self.wait_on_write,
            },
        )


def break_down(record: StepRecord, *, before: StepRecord | None = None) -> Breakdown:
    """The breakdown of one step.

    Args:
        record: The step.
        before: The step before it, whose updates this one may have waited for.
    """
    line = record.timeline
    waits = [i for i in line.in_row(Row.WAIT) if i.begin < record.end]
    backwards = [(p.begin, p.end) for p in record.phases if p.name == "backward"]
    bwd = record.phase_seconds("backward")
    bwd_wait = overlap_seconds(union(waits), backwards)
    stood = union(waits)

    def _wait_on(row: Row) -> float:
        busy: list[Interval] = list(line.in_row(row))
        if before is not None:
            busy += before.timeline.in_row(row)
        return overlap_seconds(stood, union(busy))

    return Breakdown(
        step_seconds=record.end - record.begin,
        fwd=record.phase_seconds("forward"),
        bwd=bwd,
        bwd_inner=bwd - bwd_wait,
        bwd_allreduce=0.0,
        bwd_other=bwd_wait,
        step=record.phase_seconds("step"),
        optim_step=_update_seconds(record),
        allgather=0.0,
        reduce_scatter=0.0,
        exposed_wait=sum(end - begin for begin, end in stood),
        up_bytes=line.nbytes(Row.UP),
        down_bytes=line.nbytes(Row.DOWN),
        up_busy=line.busy_seconds(Row.UP),
        down_busy=line.busy_seconds(Row.DOWN),
        host_busy=line.busy_seconds(Row.HOST_UPDATE),
        wait_on_up=_wait_on(Row.UP),
        wait_on_down=_wait_on(Row.DOWN),
        wait_on_host=_wait_on(Row.HOST_UPDATE),
        wait_on_read=_wait_on(Row.READ),
        wait_on_write=_wait_on(Row.WRITE),
        weights_in_time=record.weights_in_time,
        weights_late=record.weights_late,
        gathers_uneven=record.gathers_uneven,
    )


def _update_seconds(record: StepRecord) -> float:
    agreed = record.agreed
    if agreed is None:
        return 0.0
    ends = [
        interval.end
        for interval in record.timeline.intervals
        if interval.row is not Row.WAIT and interval.begin >= agreed
        if interval.row is not Row.COMPUTE
    ]
    return max(ends, default=agreed) - agreed


def mean_of(breakdowns: Sequence[Breakdown]) -> Breakdown:
    """Field by field; at least one."""
    count = len(breakdowns)
    return Breakdown(
        **{
            field.name: sum(getattr(one, field.name) for one in breakdowns) / count
            for field in fields(Breakdown)
        }
    )


class BreakdownLog:
    """Writes a line for each step, and every few steps the means and the verdict.

    Args:
        every: Steps between two lines of means.
    """

    def __init__(self, *, every: int = 10) -> None:
        self._every = every
        self._last: StepRecord | None = None
        self._recent: deque[Breakdown] = deque(maxlen=every)

    def __call__(self, record: StepRecord) -> None:
        """Take a step."""
        for line in self.lines(record):
            say(line)

    def lines(self, record: StepRecord) -> Iterable[str]:
        """What a step adds to the log."""
        breakdown = break_down(record, before=self._last)
        self._last = record
        self._recent.append(breakdown)
        yield breakdown.line(f"step={record.step}")
        if record.step % self._every == 0:
            mean = mean_of(self._recent)
            yield mean.line(f"mean of {len(self._recent)} steps")
            yield mean.sentence()


def say(line: str) -> None:
    """Through logging where someone listens there, else to stderr.

    Without any set-up Python's logging drops what is no warning; whoever gave the logger
    "forebay" a level above INFO wants silence.
    """
    if _log.isEnabledFor(logging.INFO) and _log.hasHandlers():
        _log.info(line)
    elif _log.level <= logging.INFO:
        sys.stderr.write(line + "\n")
