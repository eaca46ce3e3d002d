"""Host arenas: private anonymous mappings of exact size, reserved in the ledger first.

An arena is one mapping and its page lock. It is not an allocator: offsets inside it come from a
layout (`forebay.model`). Torch's own pinned allocator is not used because it rounds each block up
to a power of two, and shared memory is not used because containers often give it 64 MB.

[Note: guard pages] Each mapping lies between two inaccessible pages. They cost address space
only. With them the kernel cannot merge neighbouring mappings into one, so `smaps` tells the
resident bytes of each arena; and a native kernel that runs past an end stops instead of writing
into the next arena.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from forebay.errors import BudgetError, EngineClosedError
from forebay.hardware.reason import reason_of
from forebay.tiers.ledger import Ledger, Role, Tier
from forebay.tiers.numa import interleave, nodes_at_work
from forebay.tiers.page_locking import LockState

if TYPE_CHECKING:
    from forebay.tiers.page_locking import PageLock, PageLocking

__all__ = ["HostArena", "resident_bytes"]

# linux/prctl.h: PR_SET_VMA ("SVMA") and its only operation, PR_SET_VMA_ANON_NAME.
_PR_SET_VMA = 0x53564D41
_PR_SET_VMA_ANON_NAME = 0
_PROT_NONE = 0


class HostArena:
    """A range of host memory of exact size (rounded up to pages), zero when fresh.

    The bytes are reserved before the mapping is made. They return to the ledger when the mapping
    is really gone: at `close`, or when the last tensor that views it dies, whichever is later.

    Not thread-safe to close while it is used; views may be taken from any thread. A process
    forked from this one does not see host-tier arenas (`MADV_DONTFORK`): data-loader workers
    would otherwise double their size, page by page, as the update writes them.

    Args:
        nbytes: Usable bytes; 0 is legal.
        ledger: Where the bytes are counted.
        role: What they are in training.
        what: A short noun phrase for messages.
        tier: `Tier.HOST`, or `Tier.DEVICE` for the device arena of the `cpu` accelerator.
        page_locking: Lock all pages by this policy, in the background; None leaves them pageable.

    Attributes:
        address: Address of the first byte, page-aligned.
        nbytes: Usable and reserved bytes, a multiple of the page size.
        tier: The tier that it counts to.
        role: What its bytes are in training.

    Raises:
        BudgetError: The budget does not hold the bytes, or the system has no address space.

    Example:
        >>> ledger = Ledger()
        >>> with HostArena(100, ledger=ledger, role=Role.STAGING, what="an example") as arena:
        ...     arena.tensor(torch.float32, offset_bytes=64, elements=3).tolist()
        [0.0, 0.0, 0.0]
        >>> ledger.bytes(Tier.HOST)
        0
    """

    def __init__(
        self,
        nbytes: int,
        *,
        ledger: Ledger,
        role: Role,
        what: str,
        tier: Tier = Tier.HOST,
        page_locking: PageLocking | None = None,
    ) -> None:
        page = mmap.PAGESIZE
        self.nbytes = -(-nbytes // page) * page
        self.tier = tier
        self.role = role
        self._what = what
        reservation = ledger.reserve(tier, role, self.nbytes, what=what)
        try:
            mapping = mmap.mmap(
                -1, self.nbytes + 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as error:
            reservation.release()
            reason, hint = reason_of(
                error, hint="free host memory, or raise the limit on address space (ulimit -v)"
            )
            raise BudgetError(
                f"cannot map {self.nbytes} bytes of host memory for {what}: {reason}", hint=hint
            ) from error
        # `finalize` on the mapping, not on the arena: a view keeps the mapping alive.
        weakref.finalize(mapping, reservation.release).atexit = False
        view = memoryview(mapping)
        self._view: memoryview | None = view[page : page + self.nbytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + page
        _advise(mapping, nbytes=self.nbytes, tier=tier)
        if tier is Tier.HOST:
            interleave(self.address, nbytes=self.nbytes, nodes=nodes_at_work())
        _protect_and_name(
            self.address, nbytes=self.nbytes, name=f"forebay:{tier.value}:{role.value}"
        )
        self._lock: PageLock | None = None
        self._unlock: weakref.finalize[[PageLock], HostArena] | None = None
        if page_locking is not None:
            self.lock(page_locking, nbytes=self.nbytes)

    def lock(self, page_locking: PageLocking, *, nbytes: int) -> None:
        """Begin to lock the pages of the first `nbytes` bytes; returns at once.

        At most once, unless that policy locked nothing.
        """
        assert self._lock is None
        nbytes = min(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, self.nbytes)
        if nbytes:
            self._lock = page_locking.lock(
                self.address, nbytes=nbytes, what=self._what, keep=self._view
            )
        if self._lock is not None:
            self._unlock = weakref.finalize(self, page_locking.unlock, self._lock)
            self._unlock.atexit = False

    @property
    def locked(self) -> bool:
        """Whether pages are locked for a copy engine by now."""
        return self._lock is not None and self._lock.state is LockState.LOCKED

    @property
    def is_locking(self) -> bool:
        """Whether pages are locked, or were to be."""
        return self._lock is not None

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._view is None

    def tensor(self, dtype: torch.dtype, *, offset_bytes: int, elements: int) -> torch.Tensor:
        """A one-dimensional CPU tensor over a range of the arena; it keeps the memory alive.

        Raises:
            ValueError: The range leaves the arena or is not aligned to the dtype.
            EngineClosedError: The arena is closed.
        """
        if self._view is None:
            raise EngineClosedError(f"the host memory of {self._what} was given back")
        end = offset_bytes + elements * dtype.itemsize
        if offset_bytes < 0 or elements < 0 or end > self.nbytes:
            raise ValueError(
                f"bytes {offset_bytes} to {end} are not inside the {self.nbytes} bytes "
                f"of {self._what}"
            )
        if offset_bytes % dtype.itemsize:
            raise ValueError(f"byte {offset_bytes} is not aligned to {dtype}")
        if elements == 0:
            return torch.empty(0, dtype=dtype)
        # frombuffer drops its export at once but keeps this memoryview, and with it the mapping.
        return torch.frombuffer(self._view, dtype=dtype, count=elements, offset=offset_bytes)

    def resident_bytes(self) -> int:
        """Bytes of the arena that occupy physical memory now (Linux: `smaps`)."""
        return resident_bytes(self.address, nbytes=self.nbytes)

    def close(self) -> None:
        """Unlock the pages and let go of the memory (idempotent).

        Tensors that view the arena stay readable; the memory returns when the last of them dies.
        """
        if self._unlock is not None:
            self._unlock()
        self._view = None

    def __enter__(self) -> HostArena:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def resident_bytes(address: int, *, nbytes: int, smaps: Path = Path("/proc/self/smaps")) -> int:
    """Resident bytes of the mappings that lie wholly inside a range.

    Args:
        address: First byte of the range.
        nbytes: Its length.
        smaps: The file to read; a parameter for tests.
    """
    total = 0
    inside = False
    with smaps.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            head, _, rest = line.partition(" ")
            if head.endswith(":"):
                if inside and head == "Rss:":
                    total += int(rest.split()[0]) * 1024
                continue
            first, _, last = head.partition("-")
            inside = int(first, 16) >= address and int(last, 16) <= address + nbytes
    return total


def _advise(mapping: mmap.mmap, *, nbytes: int, tier: Tier) -> None:
    """Ask for huge pages (best effort), and keep host state out of forked workers."""
    if not nbytes:
        return
    advice = [mmap.MADV_HUGEPAGE]
    if tier is Tier.HOST:
        advice.append(mmap.MADV_DONTFORK)
    for one in advice:
        with contextlib.suppress(OSError):
            mapping.madvise(one, mmap.PAGESIZE, nbytes)


def _protect_and_name(address: int, *, nbytes: int, name: str) -> None:
    """Make the guard pages inaccessible and name the range for `/proc/self/smaps`.

    Both are conveniences: a kernel that refuses either changes nothing else.
    See [Note: guard pages].
    """
    page = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    for guard in (address - page, address + nbytes):
        libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), _PROT_NONE)
    if nbytes and hasattr(libc, "prctl"):
        libc.prctl(
            _PR_SET_VMA,
            ctypes.c_ulong(_PR_SET_VMA_ANON_NAME),
            ctypes.c_ulong(address),
            ctypes.c_ulong(nbytes),
            os.fsencode(name),
        )
