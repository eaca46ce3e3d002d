"""Tickets of work that has ended before its ticket is seen."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Ticket"]


class Ticket:
    """Ended work: done with its results, or failed with a text."""

    def __init__(self, pieces: int = 0) -> None:
        self.pieces = pieces
        self._failure = ""
        self._results: list[float] = []
        self._began_ns = self._ended_ns = 0

    @staticmethod
    def completed() -> Ticket:
        """A ticket without pieces that is done."""
        return Ticket()

    @staticmethod
    def of(
        pieces: int, *, after: Iterable[Ticket], work: Callable[[], list[float] | None]
    ) -> Ticket:
        """Do `work` unless a predecessor failed; returns how it ended."""
        ticket = Ticket(pieces)
        for predecessor in after:
            if predecessor.failed:
                ticket._failure = predecessor._failure
                return ticket
        ticket._began_ns = time.monotonic_ns()
        try:
            ticket._results = work() or []
            ticket._ended_ns = time.monotonic_ns()
        except (RuntimeError, MemoryError) as error:
            ticket._failure = str(error) or type(error).__name__
        return ticket

    @property
    def done(self) -> bool:
        """True unless the work failed."""
        return not self._failure

    @property
    def failed(self) -> bool:
        """True when this work, or work before it, failed."""
        return bool(self._failure)

    @property
    def pieces_done(self) -> int:
        """All of them, or none when the work failed."""
        return self.pieces if self.done else 0

    @property
    def pieces_issued(self) -> int:
        """All of them, or none when the work failed."""
        return self.pieces_done

    def wait(self, timeout_s: float = -1.0) -> bool:  # noqa: ARG002
        """True at once.

        Raises:
            RuntimeError: The work failed.
        """
        if self._failure:
            raise RuntimeError(self._failure)
        return True

    def wait_issued(self, timeout_s: float = -1.0) -> bool:
        """As `wait`."""
        return self.wait(timeout_s)

    def stream_wait(self, stream: int) -> None:  # noqa: ARG002
        """Nothing is under way; raises when the work failed."""
        self.wait()

    def times(self) -> list[tuple[int, int]]:
        """(begin, end) of each piece: equal shares of the time that the work took."""
        if not self._ended_ns:
            return [(0, 0)] * self.pieces
        marks = [
            self._began_ns + (self._ended_ns - self._began_ns) * piece // self.pieces
            for piece in range(self.pieces + 1)
        ]
        return list(itertools.pairwise(marks))

    def results(self) -> list[float]:
        """The values of a square-sum."""
        self.wait()
        return list(self._results)
