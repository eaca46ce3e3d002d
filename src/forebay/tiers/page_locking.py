"""Page-locking: ranges of host memory are locked for a copy engine in the background.

It locks and unlocks; whose memory it is, and when it goes, is the arena's business. Locking takes
some 0.7 s per GiB, so nobody waits for it: a copy from or to a range that is not locked yet goes
the driver's pageable way, which is slower and moves the same bytes. Ranges are locked whole, since
a copy must not reach from locked into pageable memory.

[Note: letting go] A range may be given back at any time, by `close` or by the collector of
garbage, whose finalizers run in any thread and may interrupt this file anywhere. So the lock is
reentrant, no range is locked while it is held, and the mapping of a range that is being locked
is kept alive until the driver has answered and the range is unlocked again.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import deque
from enum import Enum
from typing import Protocol

from forebay.errors import ForebayWarning, TransferError
from forebay.hardware.thread_limit import starting
from forebay.units_of_measure import format_bytes

__all__ = ["LockState", "PageLock", "PageLocker", "PageLocking"]


class PageLocker(Protocol):
    """Locks host pages for a copy engine; the engines of the native core are page lockers.

    Call order: `PageLocking` calls `register_host` at most once after an arena is mapped and
    `unregister_host` once before it is unmapped, if the first succeeded. From any thread.
    """

    def register_host(self, address: int, nbytes: int, /) -> None:
        """Lock the pages of a range; raises RuntimeError with the driver's reason."""

    def unregister_host(self, address: int, /) -> None:
        """Unlock a range that was locked from this address."""


class LockState(Enum):
    """How far a range is."""

    WAITING = "waiting"
    """Pageable; its turn comes."""
    LOCKING = "locking"
    """The driver is at it; copies still go the pageable way."""
    LOCKED = "locked"
    """Copies go at the link's speed, beside computation."""
    PAGEABLE = "pageable"
    """Refused, or given back."""


class PageLock:
    """One range and how far it is; made by `PageLocking.lock` alone.

    Attributes:
        address: First byte.
        nbytes: Length.
        what: A short noun phrase for messages.
        state: How far it is.
    """

    __slots__ = ("address", "given_back", "keep", "nbytes", "state", "what")

    def __init__(self, address: int, *, nbytes: int, what: str, keep: object) -> None:
        self.address = address
        self.nbytes = nbytes
        self.what = what
        self.state = LockState.WAITING
        # See [Note: letting go].
        self.given_back = False
        self.keep: object | None = keep


class PageLocking:
    """The policy "lock the pages of arenas for this engine, or go on without and say so once".

    Locking fails where the driver or the operating system caps locked memory. Training is then
    slower but right, so it goes on with pageable memory after one warning that names host memory
    and bytes (the driver's own text is "out of memory", which sends people to look at the
    accelerator).

    Thread-safe.

    Args:
        locker: The engine whose copies the arenas serve; None where no copy needs locked pages, so
            that every range stays pageable and there is nothing to wait for.

    Attributes:
        locked_bytes: Bytes locked now.
        pageable_bytes: Bytes whose lock was refused.
        refusal: Why the first was, as a message; None while none was.

    Example:
        >>> class Locker:
        ...     def register_host(self, address, nbytes, /): ...
        ...     def unregister_host(self, address, /): ...
        >>> locking = PageLocking(Locker())
        >>> lock = locking.lock(0x1000, nbytes=4096, what="an example", keep=None)
        >>> locking.wait()
        True
        >>> lock.state
        <LockState.LOCKED: 'locked'>
    """

    def __init__(self, locker: PageLocker | None) -> None:
        self._locker = locker
        self.locked_bytes = 0
        self.pageable_bytes = 0
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[PageLock] = deque()
        self._working = False
        self.refusal: str | None = None
        self._reported = False

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are still to be locked."""
        with self._changed:
            return sum(lock.nbytes for lock in self._waiting)

    def lock(self, address: int, *, nbytes: int, what: str, keep: object) -> PageLock | None:
        """Begin to lock a range; returns at once, None where it stays pageable.

        Args:
            address: First byte, page-aligned.
            nbytes: Length, whole pages.
            what: A short noun phrase for messages.
            keep: What keeps the memory mapped; let go of when the driver is done with it.
        """
        if self._locker is None:
            return None
        lock = PageLock(address, nbytes=nbytes, what=what, keep=keep)
        with self._changed:
            self._waiting.append(lock)
            idle, self._working = not self._working, True
        if idle:
            # Not a daemon: one that returns from the driver while the interpreter goes down would
            # be ended inside native code. It ends by itself; see `_next`.
            try:
                with starting("page-locking"):
                    threading.Thread(target=self._work, name="forebay-page-locking").start()
            except TransferError:
                with self._changed:  # nobody is left who would
                    self._working = False
                raise
        return lock

    def unlock(self, lock: PageLock) -> None:
        """Give a range back, however far it is; never raises, never waits for it to be locked."""
        with self._changed:
            lock.given_back = True
            if lock.state is LockState.WAITING:
                lock.state, lock.keep = LockState.PAGEABLE, None
                with contextlib.suppress(ValueError):
                    self._waiting.remove(lock)
            self._let_go(lock)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every range asked for is locked, refused or given back; False on time-out."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._working, timeout_s)

    def report(self) -> None:
        """Warn of the first refusal, once, in the caller's thread."""
        if self.refusal and not self._reported:
            self._reported = True
            warnings.warn(self.refusal, ForebayWarning, stacklevel=3)

    def _work(self) -> None:
        while (lock := self._next()) is not None:
            assert self._locker is not None
            keep, error = lock.keep, None
            if not lock.given_back:
                try:
                    self._locker.register_host(lock.address, lock.nbytes)
                except Exception as reason:
                    error = reason
                self._settle(lock, error)
            del keep

    def _next(self) -> PageLock | None:
        with self._changed:
            # At the end of the program the rest is not worth waiting for.
            if not self._waiting or not threading.main_thread().is_alive():
                self._working = False
                self._changed.notify_all()
                return None
            lock = self._waiting.popleft()
            lock.state = LockState.LOCKING
            return lock

    def _settle(self, lock: PageLock, error: Exception | None) -> None:
        with self._changed:
            if error is None:
                self.locked_bytes += lock.nbytes
                lock.state = LockState.LOCKED
                if lock.given_back:
                    self._let_go(lock)
            else:
                lock.state = LockState.PAGEABLE
                if not self.pageable_bytes:
                    self.refusal = _refusal(lock, error)
                self.pageable_bytes += lock.nbytes
            lock.keep = None

    def _let_go(self, lock: PageLock) -> None:
        """Unlock a range if it is locked; the lock of this object is held."""
        if lock.state is LockState.LOCKED:
            assert self._locker is not None
            lock.state = LockState.PAGEABLE
            self.locked_bytes -= lock.nbytes
            # The driver may be gone when the interpreter shuts down; it unlocks by itself.
            with contextlib.suppress(RuntimeError, OSError):
                self._locker.unregister_host(lock.address)


def _refusal(lock: PageLock, reason: Exception) -> str:
    return (
        f"page-locking {format_bytes(lock.nbytes)} ({lock.nbytes} bytes) of host memory "
        f"for {lock.what} failed: {reason}; accelerator memory is not the cause. Such "
        "memory stays pageable: copies are slower, results are the same\n"
        "hint: raise the limit on locked memory (ulimit -l), or free host memory"
    )
