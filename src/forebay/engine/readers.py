"""Who still reads a unit's state: an update of it waits until they are done.

A checkpoint that is written while training goes on reads units in the order in which the next
step updates them; each part asks here before its state changes. It copies nothing.

[Note: ranks meet] Over ranks a step that waited for its own disk, unit by unit, would leave the
others in a collective, whose time runs out. So the first step after a save begins where the ranks
meet once: each comes when its checkpoint has read all that it reads, and waits there for the others
without a time limit, as long as they live.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from forebay.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from forebay.comm.together import Together

__all__ = ["Readers", "Reading"]

# How often somebody who waits looks whether the other ranks are still there.
_LOOK_SECONDS: Final = 1.0


class Readers:
    """The units that one checkpoint has not read yet. Thread-safe, but for `meet`.

    Args:
        units: Their indices.
        together: Where the ranks meet.
        check: Called now and then by who waits; raises RankError when another rank is gone.
    """

    def __init__(
        self, units: Iterable[int], *, together: Together, check: Callable[[], None]
    ) -> None:
        self._unread = set(units)
        self._changed = threading.Condition()
        self._is_finished = False
        self._together = together
        self._check = check
        self._waited_seconds = 0.0
        self._waits_since: float | None = None
        self._lost: RankError | None = None

    @property
    def waited_seconds(self) -> float:
        """How long training has waited so far; it may wait now."""
        since = self._waits_since
        return self._waited_seconds + (0.0 if since is None else time.monotonic() - since)

    def of(self, unit: int) -> Reading:
        """What a part of a unit asks."""
        return Reading(self, unit)

    def done(self, unit: int) -> None:
        """A unit was read to its end.

        Raises:
            RankError: Training has found meanwhile that a rank is gone: reading on is of no use.
        """
        if self._lost is not None:
            raise RankError(self._lost.message, hint=self._lost.hint)
        with self._changed:
            self._unread.discard(unit)
            self._changed.notify_all()

    def finish(self) -> None:
        """Nothing will be read any more, and the save is over, well or not."""
        with self._changed:
            self._unread.clear()
            self._is_finished = True
            self._changed.notify_all()

    def wait(self, unit: int) -> None:
        """Return once a unit may change.

        Raises:
            RankError: Another rank is gone.
        """
        with self._counted():
            self._await(lambda: unit not in self._unread)

    def meet(self) -> None:
        """Return once no rank reads anything; every rank calls it once. See [Note: ranks meet].

        Raises:
            RankError: Another rank is gone.
        """
        with self._counted():
            self._await(lambda: not self._unread)
            self._together.tell("", what="a step that waits for checkpoints to be copied")

    def await_end(self) -> None:
        """Return once the save is over.

        Raises:
            RankError: Another rank is gone.
        """
        self._await(lambda: self._is_finished)

    def _await(self, is_over: Callable[[], bool]) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(is_over, timeout=_LOOK_SECONDS):
                    return
            self._check()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._waits_since = began = time.monotonic()
        try:
            yield
        except RankError as error:
            self._lost = error
            raise
        finally:
            self._waits_since = None
            self._waited_seconds += time.monotonic() - began


@dataclass(frozen=True, slots=True)
class Reading:
    """What one checkpoint has to read of a unit.

    Attributes:
        readers: That checkpoint's.
        unit: The unit's index.
    """

    readers: Readers
    unit: int

    def wait(self) -> None:
        """Return once the unit may change; see `Readers.wait`."""
        self.readers.wait(self.unit)
