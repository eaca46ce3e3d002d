"""How long a queue had work, from its tickets' own times; it waits for none of them."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

__all__ = ["BusyTime"]


class BusyTime:
    """Seconds in which at least one piece was worked on, of tickets in the order of their calls.

    A piece that was begun before one of an earlier ticket counts from that one's end on. Any thread
    may call.
    """

    def __init__(self) -> None:
        self._open: deque[Any] = deque()
        self._lock = threading.Lock()
        self._nanoseconds = 0
        self._until = 0

    def add(self, ticket: Any) -> Any:
        """Count a ticket once it is done; returns it."""
        with self._lock:
            self._open.append(ticket)
            self._count()
        return ticket

    @property
    def seconds(self) -> float:
        """So far, of what is done."""
        with self._lock:
            self._count()
            return 1e-9 * self._nanoseconds

    def _count(self) -> None:
        while self._open and (self._open[0].done or self._open[0].failed):
            for begin, end in sorted(self._open.popleft().times()):
                self._nanoseconds += max(0, end - max(begin, self._until))
                self._until = max(self._until, end)
