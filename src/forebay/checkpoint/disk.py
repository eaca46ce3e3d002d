"""The seam to the file system: the few operations that a checkpoint is made of.

Tests put a recorder or a failing disk in its place; nothing else in this package writes files.

[Note: direct writes] A write through the page cache copies every byte once more, on the cores that
train, and dirties memory until the disk has it: 0.3 s of a core per GB where a direct write takes
0.04. What begins and ends at multiples of a page in the file, and lies aligned in memory, goes
directly; the rest (a tensor's last bytes, small tensors) through the cache, never in the same page.
Small writes gain nothing: each would wait for the disk.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FILE_ALIGNMENT", "MEMORY_ALIGNMENT", "Disk", "RealDisk", "is_aligned"]

# Of positions and sizes: a page, which is a multiple of every logical block.
FILE_ALIGNMENT: Final = 4096
# Of addresses: what block devices ask for at most; parameters lie so in every layout.
MEMORY_ALIGNMENT: Final = 512
_DIRECT_BYTES: Final = 64 << 10
# What a file system says that knows no such call, or cannot write so.
_UNABLE: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


def is_aligned(data: memoryview) -> bool:
    """Whether bytes lie in memory so that they can be written directly."""
    return np.frombuffer(data, np.uint8).ctypes.data % MEMORY_ALIGNMENT == 0


class Disk(Protocol):
    """What saving asks of a file system.

    Call order for a file: `create`, any number of `write`s from any thread, `sync`, `close`.
    For a folder: `make_folder`, its files, `sync_folder`, `rename`, `sync_folder` of its parent.
    Every method raises OSError.
    """

    def make_folder(self, path: Path) -> None:
        """Make a folder that is not there yet."""

    def create(self, path: Path, *, nbytes: int = 0) -> int:
        """Make a new file with room for so many bytes, and return its descriptor."""
        ...

    def write(self, file: int, data: memoryview, *, at: int) -> None:
        """Write all of `data` at a position."""

    def sync(self, file: int) -> None:
        """Make a file's bytes durable."""

    def close(self, file: int) -> None:
        """Close a descriptor."""

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name at once, over a file that has it."""

    def remove_tree(self, path: Path) -> None:
        """Remove a folder (never through a link) or a file, if it is there."""


class RealDisk:
    """The operating system's; see [Note: direct writes]."""

    def __init__(self) -> None:
        self._direct: dict[int, int] = {}

    def make_folder(self, path: Path) -> None:
        """Make a folder that is not there yet."""
        path.mkdir()

    def create(self, path: Path, *, nbytes: int = 0) -> int:
        """Make a new file, its blocks laid out for so many bytes, and return its descriptor."""
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        try:
            if nbytes:
                _allocate(file, nbytes)
            if nbytes >= _DIRECT_BYTES:
                self._open_direct(file, path)
        except BaseException:
            os.close(file)
            raise
        return file

    def _open_direct(self, file: int, path: Path) -> None:
        try:
            self._direct[file] = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _UNABLE:
                raise

    def write(self, file: int, data: memoryview, *, at: int) -> None:
        """Write all of `data` at a position, and let it go to the disk at once."""
        done = self._write_direct(file, data, at=at)
        begin, left = at + done, data[done:]
        at = begin
        while left:
            written = os.pwrite(file, left, at)
            left, at = left[written:], at + written
        # Starts the write-back and drops clean pages, so that no gigabytes of dirty pages wait
        # for the sync, or push other memory out.
        if at > begin:
            os.posix_fadvise(file, begin, at - begin, os.POSIX_FADV_DONTNEED)

    def _write_direct(self, file: int, data: memoryview, *, at: int) -> int:
        """Write what can be written directly; returns how many bytes that were."""
        direct = self._direct.get(file)
        size = len(data) - len(data) % FILE_ALIGNMENT
        if direct is None or size < _DIRECT_BYTES or at % FILE_ALIGNMENT or not is_aligned(data):
            return 0
        done = 0
        while done < size:
            try:
                written = os.pwrite(direct, data[done:size], at + done)
            except OSError as error:
                if error.errno not in _UNABLE:
                    raise
                break
            if not written or written % FILE_ALIGNMENT:
                break  # the page that was begun is written again, whole, through the cache
            done += written
        return done

    def sync(self, file: int) -> None:
        """Make a file's bytes durable."""
        os.fsync(file)

    def close(self, file: int) -> None:
        """Close a descriptor."""
        direct = self._direct.pop(file, None)
        if direct is not None:
            os.close(direct)
        os.close(file)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name at once, over a file that has it."""
        source.replace(target)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder (never through a link) or a file, if it is there."""
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)
        elif path.exists():
            shutil.rmtree(path)


def _allocate(file: int, nbytes: int) -> None:
    """Lay out a file's blocks, where the file system can; a full disk is seen here at the latest.

    Not os.posix_fallocate, which writes into every block where it cannot.
    """
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    while call(file, 0, 0, nbytes):
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code not in _UNABLE:
            raise OSError(code, os.strerror(code))
        return
