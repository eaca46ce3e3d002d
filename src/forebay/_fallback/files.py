"""File sets and queues that have read or written when they return."""

# The signatures are the native core's.
# ruff: noqa: ARG002, FBT001, FBT002, PLR0913, PLR0917

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from typing import TYPE_CHECKING

from forebay._fallback.tickets import Ticket

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "FileBackend",
    "FileQueue",
    "FileSet",
    "ScriptedBackend",
    "ThreadBackend",
    "UringBackend",
]

_ALIGNMENT = 4096
_MOST_BLOCK_BYTES = 1 << 30
_MOST_STALLS = 16


class FileBackend:
    """Base of the backends: does one block."""

    def transfer(self, action: str, descriptor: int, view: memoryview, offset: int) -> int:
        """Read or write; returns the bytes transferred. Raises OSError."""
        if action == "reading":
            return os.preadv(descriptor, [view], offset)
        return os.pwritev(descriptor, [view], offset)


class ThreadBackend(FileBackend):
    """One block at a time, in the calling thread."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"a thread backend needs at least 1 thread, not {threads}")


class UringBackend(FileBackend):
    """There is none without the native core.

    Raises:
        RuntimeError: Always.
    """

    def __init__(self, depth: int) -> None:
        raise RuntimeError("io_uring is not available: the fallback has none")


class ScriptedBackend(FileBackend):
    """Fails the n-th block, or transfers a part of it; delays mean nothing here."""

    def __init__(
        self,
        inner: FileBackend,
        seed: int = 0,
        max_delay_us: int = 0,
        fail_at: int = -1,
        fail_errno: int = 5,
        short_at: int = -1,
        short_bytes: int = 0,
    ) -> None:
        self._inner = inner
        self._fail_at, self._fail_errno = fail_at, fail_errno
        self._short_at, self._short_bytes = short_at, short_bytes
        self._num_blocks = 0

    def transfer(self, action: str, descriptor: int, view: memoryview, offset: int) -> int:
        """Do a block by the script."""
        number = self._num_blocks
        self._num_blocks += 1
        if number == self._fail_at:
            raise OSError(self._fail_errno, os.strerror(self._fail_errno))
        if number == self._short_at:
            view = view[: self._short_bytes]
        return self._inner.transfer(action, descriptor, view, offset) if len(view) else 0


class FileSet:
    """Stripe i of the space lies in file i % n."""

    def __init__(self, descriptors: list[int], names: list[str], stripe_bytes: int) -> None:
        _check_multiple("the length of a stripe", stripe_bytes)
        if not descriptors or not stripe_bytes or len(names) != len(descriptors):
            raise ValueError(
                f"a set needs stripes and a name for each file; got {len(descriptors)} files, "
                f"{len(names)} names"
            )
        self.names = list(names)
        self.stripe_bytes = stripe_bytes
        self.descriptors = [os.dup(descriptor) for descriptor in descriptors]
        weakref.finalize(self, _close_all, list(self.descriptors))

    @property
    def files(self) -> int:
        """Number of files."""
        return len(self.descriptors)

    def place(self, offset: int, nbytes: int) -> tuple[int, int, int]:
        """(file, offset in it, bytes up to the end of the stripe)."""
        if len(self.descriptors) == 1:
            return 0, offset, nbytes
        stripe, inside = divmod(offset, self.stripe_bytes)
        row, file = divmod(stripe, len(self.descriptors))
        return file, row * self.stripe_bytes + inside, min(nbytes, self.stripe_bytes - inside)


class FileQueue:
    """Reads and writes in the calling thread, block by block."""

    def __init__(
        self,
        backend: FileBackend,
        depth: int = 8,
        block_bytes: int = 1 << 20,
        single_submit: bool = False,
        overlap_events: bool = True,
        name: str = "files",
    ) -> None:
        if depth < 1 or block_bytes < 1:
            raise ValueError("a file queue needs a depth and a block length of at least 1")
        _check_multiple("the length of a block", block_bytes)
        if block_bytes > _MOST_BLOCK_BYTES:
            raise ValueError(f"a block of {block_bytes} bytes is longer than {_MOST_BLOCK_BYTES}")
        self._backend = backend
        self._block_bytes = block_bytes
        self._name = name
        self._closed = False
        self.bytes_read = self.bytes_written = self.blocks = 0

    def read(
        self,
        files: FileSet,
        spans: Sequence[tuple[int, int, int]],
        priority: int = 0,
        after: Sequence[Ticket] = (),
        piecewise: Ticket | None = None,
    ) -> Ticket:
        """Fill memory from a set."""
        ticket = self._transfer("reading", files, spans, after, piecewise)
        if ticket.done:
            self.bytes_read += sum(nbytes for _, _, nbytes in spans)
        return ticket

    def write(
        self,
        files: FileSet,
        spans: Sequence[tuple[int, int, int]],
        priority: int = 0,
        after: Sequence[Ticket] = (),
        piecewise: Ticket | None = None,
    ) -> Ticket:
        """Write memory to a set."""
        ticket = self._transfer("writing", files, spans, after, piecewise)
        if ticket.done:
            self.bytes_written += sum(nbytes for _, _, nbytes in spans)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Everything has ended already."""

    def close(self) -> None:
        """Refuse work from now on."""
        self._closed = True

    def _transfer(
        self,
        action: str,
        files: FileSet,
        spans: Sequence[tuple[int, int, int]],
        after: Sequence[Ticket],
        piecewise: Ticket | None,
    ) -> Ticket:
        if self._closed:
            raise RuntimeError(f"file queue '{self._name}' is closed")
        for offset, address, nbytes in spans:
            _check_multiple("an offset", offset)
            _check_multiple("an address", address)
            _check_multiple("a length", nbytes)
            if nbytes and not address:
                raise ValueError(f"a span of {nbytes} bytes has no address")

        def work() -> None:
            for offset, address, nbytes in spans:
                done = 0
                while done < nbytes:
                    most = min(nbytes - done, self._block_bytes)
                    file, at, count = files.place(offset + done, most)
                    self.blocks += 1
                    self._block(action, files, file, at, address + done, count)
                    done += count

        predecessors = [*after] if piecewise is None else [*after, piecewise]
        return Ticket.of(len(spans), after=predecessors, work=work)

    def _block(
        self, action: str, files: FileSet, file: int, offset: int, address: int, nbytes: int
    ) -> None:
        stalls = 0
        while nbytes:
            buffer = (ctypes.c_char * nbytes).from_address(address)
            what = f"{action} {nbytes} bytes at byte {offset} of {files.names[file]} failed"
            try:
                done = self._backend.transfer(
                    action, files.descriptors[file], memoryview(buffer).cast("B"), offset
                )
            except OSError as error:
                if error.errno in {errno.EINTR, errno.EAGAIN}:
                    continue
                raise RuntimeError(f"{what}: {error.strerror} (errno {error.errno})") from error
            if done == 0:
                raise RuntimeError(f"{what}: the file ends there")
            if done < nbytes:  # from a sector's beginning: that is all that O_DIRECT accepts
                done -= done % _ALIGNMENT
            stalls = 0 if done else stalls + 1
            if stalls == _MOST_STALLS:
                raise RuntimeError(f"{what}: no progress in {_MOST_STALLS} attempts")
            offset, address, nbytes = offset + done, address + done, nbytes - done


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _check_multiple(what: str, value: int) -> None:
    if value % _ALIGNMENT:
        raise ValueError(f"{what} is {value}, which must be a multiple of {_ALIGNMENT}")
