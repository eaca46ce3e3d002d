"""A timeline of a few steps of a running engine."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from forebay.observe.clock import clock_for
from forebay.observe.recorder import Recorder
from forebay.plan.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.links.lanes import Lanes
    from forebay.links.observer import Moment, Observer
    from forebay.observe.records import StepRecord
    from forebay.plan.program import Lane, OpKind

__all__ = ["Recordable", "Recording", "record"]


class Recordable(Protocol):
    """The part of an engine that a recording needs."""

    @property
    def lanes(self) -> Lanes:
        """Where work is put."""
        ...

    def synchronize(self) -> None:
        """Wait for all of it."""
        ...


@dataclass(slots=True)
class Recording:
    """What was recorded; complete once the `with` block has ended.

    Attributes:
        records: One for each step.
    """

    records: list[StepRecord] = field(default_factory=list)

    @property
    def timeline(self) -> Timeline:
        """All steps in one timeline that begins at 0."""
        intervals = [
            replace(interval, name=f"{interval.name} ({record.step})")
            for record in self.records
            for interval in record.timeline.intervals
        ]
        return Timeline.of("recorded", intervals).from_zero()


@contextlib.contextmanager
def record(engine: Recordable) -> Iterator[Recording]:
    """Record every step made inside the block.

    The engine is synchronised before and after, so the first step's forward waits for nothing:
    record three steps and look at the second.

    Args:
        engine: What `forebay.initialize` returns has it as `.core`; the optimizer of
            `forebay.offload` as `.engine`.

    Example:
        >>> with record(optimizer.engine) as recording:  # doctest: +SKIP
        ...     train(steps=3)
        >>> recording.records[1].timeline.busy_seconds(Row.UP)  # doctest: +SKIP
    """
    engine.synchronize()
    lanes = engine.lanes
    recording = Recording()
    recorder = Recorder(clock_for(lanes.accelerator.device), on_record=recording.records.append)
    before = lanes.observer
    lanes.observer = _Both(before, recorder)
    try:
        yield recording
        engine.synchronize()
    finally:
        lanes.observer = before


class _Both:
    """Two observers as one."""

    def __init__(self, first: Observer, second: Observer) -> None:
        self._first = first
        self._second = second

    def mark(self, moment: Moment, unit: str = "") -> None:
        self._first.mark(moment, unit)
        self._second.mark(moment, unit)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        with self._first.waiting(what), self._second.waiting(what):
            yield

    def doing(self, kind: OpKind, unit: str) -> None:
        self._first.doing(kind, unit)
        self._second.doing(kind, unit)

    def submitted(self, lane: Lane, ticket: Any, nbytes: int) -> None:
        self._first.submitted(lane, ticket, nbytes)
        self._second.submitted(lane, ticket, nbytes)
