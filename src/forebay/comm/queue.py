"""The queue of a rank: collectives run one after the other, in the order in which they came.

Every rank fills its queue in the same order, so that no two ranks wait for each other in different
collectives. A thread works it off, beside forward and backward.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forebay.accelerators.cuda import stream_of
from forebay.comm.passes import PassKind
from forebay.errors import RankError
from forebay.hardware.thread_limit import starting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from forebay.comm.collectives import Collectives
    from forebay.comm.group import Group
    from forebay.comm.passes import Passes

__all__ = ["Job", "Queue"]

# How often somebody who waits looks whether the other ranks are still there.
_LOOK_SECONDS = 1.0
# Beside a step, which waits so once or twice, it is nothing.
_PAUSE_SECONDS = 5e-5


class Job:
    """One entry; to those who wait it is a ticket like those of the native lanes.

    Attributes:
        what: A short noun phrase for messages.
        result: What the work returned, once `done`.
    """

    def __init__(self, what: str, *, group: Group, device: torch.device) -> None:
        self.what = what
        self.result: Any = None
        self._group = group
        self._device = device
        self._event: torch.cuda.Event | None = None
        self._error: BaseException | None = None
        self._over = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._over.is_set()

    @property
    def failed(self) -> bool:
        """Whether it is over and went wrong."""
        return self.done and self._error is not None

    def finish(self, result: Any, error: BaseException | None) -> None:
        """The queue is through with it."""
        if self._device.type == "cuda" and error is None:
            self._event = torch.cuda.Event()
            self._event.record()
        self.result, self._error = result, error
        self._over.set()

    def wait(self, timeout_s: float = -1) -> bool:
        """Block until it is over and, on a device, what it enqueued has happened.

        Returns:
            False on time-out.

        Raises:
            RankError: It failed, or another rank did while this one waited.
        """
        if not self.wait_issued(timeout_s):
            return False
        if self._event is not None:
            self._await_device(self._event)
        return True

    def _await_device(self, event: torch.cuda.Event) -> None:
        """Not `synchronize`: a collective on the device whose peer is gone never ends."""
        looks_at = time.monotonic() + _LOOK_SECONDS
        while not event.query():
            time.sleep(_PAUSE_SECONDS)
            if time.monotonic() >= looks_at:
                looks_at += _LOOK_SECONDS
                self._group.check()

    def wait_issued(self, timeout_s: float = -1) -> bool:
        """Block until it is over; its device work is then enqueued. See `wait`."""
        until = None if timeout_s < 0 else time.monotonic() + timeout_s
        while not self._over.wait(
            _LOOK_SECONDS if until is None else min(_LOOK_SECONDS, timeout_s)
        ):
            if until is not None and time.monotonic() >= until:
                return False
            self._group.check()
        if self._error is not None:
            raise self._error
        return True

    def stream_wait(self, stream: int) -> None:
        """Make a device stream wait for it."""
        if self._event is not None:
            self._event.wait(stream_of(stream, device=self._device))


class Queue:
    """Works jobs off in order.

    Args:
        collectives: What jobs do; nobody else may.
        passes: Counts what the ranks begin together.
        device: Where tensors lie.

    Attributes:
        is_gated: Whether ranks meet before every job, as those must that may gather units in
            orders of their own (`forebay.comm.passes`, [Note: rounds]).
        collectives: As above.
        passes: What the ranks have begun together.
    """

    def __init__(self, collectives: Collectives, *, passes: Passes, device: torch.device) -> None:
        self.collectives = collectives
        self.passes = passes
        self._group = collectives.group
        self._device = device
        self.is_gated = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._waiting: deque[tuple[Job, Callable[[], Any], Sequence[Any], Any]] = deque()
        self._changed = threading.Condition()
        self._broken: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="forebay-ranks", daemon=True)
        with starting("the exchange between ranks"):
            self._thread.start()

    def submit(self, work: Callable[[], Any], *, what: str, after: Sequence[Any] = ()) -> Job:
        """Append a job, which every rank appends at the same point.

        Args:
            work: Runs in the queue's thread; on a device, in a stream of the queue's, after what
                the calling thread's stream has been given so far.
            what: For messages.
            after: Tickets that it follows.
        """
        if self.is_gated:
            this = self.passes.begin(PassKind.EXCHANGE)
            return self.meet(partial(self._gated, this, work), what=what, after=after)
        return self.meet(work, what=what, after=after)

    def _gated(self, this: Any, work: Callable[[], Any]) -> Any:
        self.passes.meet(this)
        return work()

    def meet(self, work: Callable[[], Any], *, what: str, after: Sequence[Any] = ()) -> Job:
        """Append a job that begins with a handshake of its own; see `submit`."""
        job = Job(what, group=self._group, device=self._device)
        event = None
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        with self._changed:
            if self._closed:
                raise RankError(f"{what}: the engine is closed")
            self._waiting.append((job, work, tuple(after), event))
            self._changed.notify_all()
        return job

    def tell(self, values: torch.Tensor, *, what: str) -> torch.Tensor:
        """Every rank's numbers, [ranks, n]; every rank calls it with as many. See `Group.tell`."""
        group = self.collectives.group
        job = self.submit(lambda: group.tell(values, what=what), what=what)
        job.wait()
        rows: torch.Tensor = job.result
        return rows

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closed:
                        return
                    self._changed.wait()
                job, work, after, event = self._waiting.popleft()
            with self._in_stream(event):
                self._run(job, work, after)
            del job, work, after, event

    def _run(self, job: Job, work: Callable[[], Any], after: Sequence[Any]) -> None:
        if self._broken is not None:
            job.finish(None, self._broken)
            return
        try:
            for ticket in after:
                self.follow(ticket)
            result = work()
        except BaseException as error:
            self._broken = error
            self._group.fail(f"{job.what}: {error}")
            job.finish(None, error)
        else:
            job.finish(result, None)

    def follow(self, ticket: Any) -> None:
        """In a job: what comes next is ordered after a ticket."""
        if self._stream is None:
            ticket.wait()
        else:
            ticket.wait_issued()
            ticket.stream_wait(self._stream.cuda_stream)

    @contextlib.contextmanager
    def _in_stream(self, event: Any) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(event)
            yield

    def uses(self, tensor: torch.Tensor) -> None:
        """A tensor of the calling thread's stream is read by a job: its memory must wait for it."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def uses_here(self, tensor: torch.Tensor) -> None:
        """A tensor that a job made is used by the device's default stream too."""
        if self._stream is not None:
            tensor.record_stream(torch.cuda.default_stream(self._device))

    def stream(self) -> contextlib.AbstractContextManager[None]:
        """For what follows a job on the device: work in here is ordered after it."""
        return contextlib.nullcontext() if self._stream is None else self._on_stream()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    def join_stream(self) -> None:
        """Order the calling thread's stream after everything that jobs have enqueued."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        """Stop; jobs that have not begun fail. Idempotent; does not wait for one that runs."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            left, self._waiting = list(self._waiting), deque()
            self._changed.notify_all()
        for job, *_ in left:
            job.finish(None, RankError(f"{job.what}: the engine was closed"))
