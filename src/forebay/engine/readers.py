"""Who still reads a unit's state: an update of it waits until they are done.

A checkpoint that is written while training goes on reads units in the order in which the next
step updates them; each part asks here before its state changes. It copies nothing.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Readers"]


class Readers:
    """The units that one checkpoint has not read yet. Thread-safe.

    Args:
        units: Their indices.

    Attributes:
        waited_seconds: How long updates have waited so far.
    """

    def __init__(self, units: Iterable[int]) -> None:
        self._unread = set(units)
        self._changed = threading.Condition()
        self.waited_seconds = 0.0

    def done(self, unit: int) -> None:
        """A unit was read to its end."""
        with self._changed:
            self._unread.discard(unit)
            self._changed.notify_all()

    def finish(self) -> None:
        """Nothing will be read any more."""
        with self._changed:
            self._unread.clear()
            self._changed.notify_all()

    def wait(self, unit: int) -> None:
        """Return once a unit may change."""
        with self._changed:
            if unit in self._unread:
                began = time.monotonic()
                self._changed.wait_for(lambda: unit not in self._unread)
                self.waited_seconds += time.monotonic() - began
