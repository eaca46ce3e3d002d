"""Functions that take turns: each in a thread of its own, one at a time, until all are done.

No two of them ever run together; the threads are there only so that each can stop in the middle.
What torch keeps for each thread (`engine.caller_state`) and Python's context variables are those
of the caller.
"""

from __future__ import annotations

import contextvars
import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from forebay.engine.caller_state import CallerState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.accelerators.base import Accelerator

__all__ = ["Turns"]

_T = TypeVar("_T")


class _StoppedError(Exception):
    """Another job failed. Not a BaseException: modules call their last hooks for errors alone."""


class _Job(Generic[_T]):
    """One function and its thread."""

    def __init__(self, run: Callable[[], _T], *, number: int) -> None:
        self.run = run
        self.number = number
        self.go = threading.Semaphore(0)
        self.paused = threading.Semaphore(0)
        self.is_done = False
        self.is_told = False
        self.is_stopped = False
        self.result: _T | None = None
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None


class Turns(Generic[_T]):
    """Runs jobs by turns.

    Args:
        accelerator: Whose stream the jobs work on.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._here = threading.local()

    @property
    def number(self) -> int | None:
        """Which job the calling thread runs; None where it runs none."""
        job: _Job[_T] | None = getattr(self._here, "job", None)
        return None if job is None else job.number

    def pause(self) -> None:
        """Let the others go first, each up to its own next pause; called by jobs."""
        job: _Job[_T] = self._here.job
        job.paused.release()
        job.go.acquire()
        if job.is_stopped:
            raise _StoppedError

    def run(
        self, functions: Sequence[Callable[[], _T]], *, done: Callable[[int, _T], None]
    ) -> list[_T]:
        """Run all of them; returns their results.

        Args:
            functions: What each job does.
            done: Called in the calling thread with each job's number and result when it has ended,
                before others go on.

        Raises:
            BaseException: What the first one that failed raised; the others were stopped.
        """
        jobs = [_Job(function, number=number) for number, function in enumerate(functions)]
        state = CallerState(self._accelerator)
        try:
            for job in jobs:
                context = contextvars.copy_context()
                job.thread = threading.Thread(
                    target=context.run, args=(self._work, job, state), daemon=True
                )
                job.thread.start()
            while not all(job.is_done for job in jobs):
                for job in jobs:
                    if not job.is_done:
                        job.go.release()
                        job.paused.acquire()
                    if job.error is not None:
                        raise job.error
                    if job.is_done and not job.is_told:
                        job.is_told = True
                        done(job.number, job.result)  # type: ignore[arg-type]
        finally:
            _stop(jobs)
        return [job.result for job in jobs]  # type: ignore[misc]

    def _work(self, job: _Job[_T], state: CallerState) -> None:
        self._here.job = job
        job.go.acquire()
        try:
            if not job.is_stopped:
                with state.entered():
                    job.result = job.run()
        except BaseException as error:
            job.error = error
        job.is_done = True
        job.paused.release()


def _stop(jobs: Sequence[_Job[Any]]) -> None:
    """Let threads end that still wait, each after its own last hooks."""
    for job in jobs:
        job.is_stopped = True
        while job.thread is not None and not job.is_done:
            job.go.release()
            job.paused.acquire()
        if job.thread is not None:
            job.thread.join()
