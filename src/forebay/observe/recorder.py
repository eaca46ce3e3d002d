"""The recorder: hears an engine's moments, waits and tickets, and makes a record of each step.

It keeps what it hears as it is and looks at it one step later, when the device and the lanes
have long passed it: reading costs no wait. A step reaches from its first forward to the next
step's, so that the updates that run under the next forward lie outside the step that computed
them; its record has them, for they are its work.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from forebay.links.observer import Moment
from forebay.observe.intervals import Marked, Submitted, Waited, build_record
from forebay.observe.records import StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from forebay.observe.clock import Clock
    from forebay.plan.program import Lane, OpKind

__all__ = ["Recorder", "StepRecord"]

# Steps whose work is still under way; older ones are given up, so that memory is bounded.
_MOST_OPEN = 8


# These are counted; they have no time of their own.
_USES = (Moment.WEIGHTS_IN_TIME, Moment.WEIGHTS_LATE, Moment.GATHERED_UNEVENLY)


@dataclass(slots=True)
class _Window:
    """What was heard of one step."""

    heard: list[Marked | Waited | Submitted] = field(default_factory=list)
    stepped: bool = False
    last: Any = None
    uses: dict[Moment, int] = field(default_factory=lambda: dict.fromkeys(_USES, 0))


class Recorder:
    """An observer that makes step records.

    Args:
        clock: The compute stream's clock.
        on_record: Takes each record, in order, one step or more after its end.
        first_step: The number of the first record.
    """

    def __init__(
        self, clock: Clock, *, on_record: Callable[[StepRecord], None], first_step: int = 1
    ) -> None:
        self._clock = clock
        self._on_record = on_record
        self._next_step = first_step
        self._window = _Window()
        self._closed: deque[tuple[_Window, Any]] = deque()
        # What the tickets that follow belong to; forward's fetches and backward's gradients come
        # from different threads.
        self._subject = threading.local()

    def mark(self, moment: Moment, unit: str = "") -> None:
        """See `Observer`."""
        if moment is Moment.IDLE:
            self.flush()
            return
        if moment in _USES:
            self._window.uses[moment] += 1
            return
        stamp = self._clock.stamp()
        begins = moment is Moment.FORWARD_BEGIN or moment is Moment.BACKWARD_BEGIN
        if begins and self._window.stepped:
            self._closed.append((self._window, stamp))
            self._window = _Window()
        self._window.heard.append(Marked(moment, unit, stamp))
        self._window.last = stamp
        if moment is Moment.STEP_END:
            self._window.stepped = True
            self._look()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """See `Observer`."""
        begin = self._clock.stamp()
        try:
            yield
        finally:
            end = self._clock.stamp()
            self._window.heard.append(Waited(what, begin, end))
            self._window.last = end

    def doing(self, kind: OpKind, unit: str) -> None:
        """See `Observer`."""
        self._subject.name = f"{kind.value} {unit}"

    def submitted(self, lane: Lane, ticket: Any, nbytes: int) -> None:
        """See `Observer`."""
        name = getattr(self._subject, "name", "")
        self._window.heard.append(Submitted(lane, name, ticket, nbytes, self._clock.stamp()))

    def flush(self) -> None:
        """Make records of all steps so far, whose work is done."""
        if self._window.stepped:
            self._closed.append((self._window, self._clock.stamp()))
            self._window = _Window()
        while self._closed:
            self._emit()

    def _look(self) -> None:
        """Make records of the steps whose work is done; waits for nothing."""
        while self._closed:
            window, end = self._closed[0]
            done = self._clock.is_reached(end) and all(
                said.ticket.done or said.ticket.failed
                for said in window.heard
                if isinstance(said, Submitted)
            )
            if not done and len(self._closed) <= _MOST_OPEN:
                return
            if done:
                self._emit()
            else:
                self._closed.popleft()
                self._next_step += 1

    def _emit(self) -> None:
        window, end = self._closed.popleft()
        record = build_record(self._next_step, window.heard, end=end, clock=self._clock)
        self._clock.rebase(end)
        self._next_step += 1
        if record is not None:
            in_time, late, uneven = (window.uses[moment] for moment in _USES)
            record = replace(record, weights_in_time=in_time, weights_late=late)
            self._on_record(replace(record, gathers_uneven=uneven))
