"""What a disk takes: the same bytes, written directly by nobody's clever program, then durable."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DiskProbe"]

_BLOCK: Final = 16 << 20
_BLOCKS: Final = 8
_WRITERS: Final = 4


class DiskProbe:
    """Writes a file of some size and removes it.

    Args:
        folder: Where.

    Attributes:
        is_direct: Whether the file system takes direct writes (`O_DIRECT`); it is asked once.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "disk-probe"
        # Noise: a drive must not make it smaller. Page-aligned, as direct writes want it.
        # Large pages make fewer, longer transfers: a fifth faster, and what the state lies in too.
        noise = mmap.mmap(-1, _BLOCK * _BLOCKS)
        with contextlib.suppress(OSError):  # a kernel without them
            noise.madvise(mmap.MADV_HUGEPAGE)
        self._noise = memoryview(noise)
        self._noise[:] = os.urandom(_BLOCK * _BLOCKS)
        self.is_direct = True
        try:
            os.close(self._open(os.O_DIRECT))
        except OSError:
            self.is_direct = False
        finally:
            self._path.unlink(missing_ok=True)

    def _open(self, flag: int) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag, 0o600)

    def seconds(self, nbytes: int) -> float:
        """Seconds from opening the file to its `fsync`; `nbytes` is rounded up to pages."""
        nbytes += -nbytes % mmap.PAGESIZE
        began = time.monotonic()
        file = self._open(os.O_DIRECT if self.is_direct else 0)
        try:
            os.posix_fallocate(file, 0, nbytes)

            def write(at: int) -> None:
                size = min(_BLOCK, nbytes - at)
                begin = at // _BLOCK % _BLOCKS * _BLOCK
                if os.pwrite(file, self._noise[begin : begin + size], at) != size:
                    raise OSError(f"the disk took less than {size} bytes")

            with ThreadPoolExecutor(_WRITERS) as pool:
                list(pool.map(write, range(0, nbytes, _BLOCK)))
            os.fsync(file)
            return time.monotonic() - began
        finally:
            os.close(file)
            self._path.unlink()
