"""Timelines as Chrome's trace JSON, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from forebay.plan.timeline import Row

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from forebay.plan.timeline import Timeline

__all__ = ["trace", "write_trace"]


def trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The trace: a process for each timeline, a thread for each row.

    Times are microseconds from each timeline's own begin, so that a predicted and a recorded
    timeline lie under each other.
    """
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines, start=1):
        events.append(_name("process_name", timeline.title, process))
        for thread, row in enumerate(Row, start=1):
            events.append(_name("thread_name", row.value, process, thread))
            events.append(
                {
                    "ph": "M",
                    "name": "thread_sort_index",
                    "pid": process,
                    "tid": thread,
                    "args": {"sort_index": thread},
                }
            )
        threads = {row: thread for thread, row in enumerate(Row, start=1)}
        for interval in timeline.from_zero().intervals:
            event: dict[str, Any] = {
                "ph": "X",
                "name": interval.name,
                "cat": interval.row.value,
                "pid": process,
                "tid": threads[interval.row],
                "ts": round(interval.begin * 1e6, 3),
                "dur": round((interval.end - interval.begin) * 1e6, 3),
            }
            if interval.nbytes:
                event["args"] = _link(interval.nbytes, interval.end - interval.begin)
            events.append(event)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_trace(path: Path, timelines: Sequence[Timeline]) -> None:
    """Write `trace` as a file."""
    path.write_text(json.dumps(trace(timelines)) + "\n", encoding="utf-8")


def _link(nbytes: int, seconds: float) -> dict[str, Any]:
    rate = nbytes / seconds / 1e9 if seconds > 0 else 0.0
    return {"bytes": nbytes, "GB/s": round(rate, 2)}


def _name(kind: str, name: str, process: int, thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
