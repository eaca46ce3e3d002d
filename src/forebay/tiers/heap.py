"""Memory that this process has freed, given back to the system.

glibc keeps freed blocks of up to 32 MiB for itself (M_MMAP_THRESHOLD moves up to there on its
own), so a model whose values have moved into arenas would stay resident beside them. It knows
nothing of what is allocated now.
"""

from __future__ import annotations

import ctypes

__all__ = ["HeapTrimmer"]


class HeapTrimmer:
    """Trims the C library's heap each time that enough freed memory has come together.

    Other C libraries than glibc have no such call and need none; then nothing happens.

    Args:
        every_bytes: How much may wait. One call takes about 0.2 ms for each MiB that it returns,
            and next to nothing where there is none.
    """

    def __init__(self, *, every_bytes: int) -> None:
        self._every_bytes = every_bytes
        self._waiting_bytes = 0

    def freed(self, nbytes: int) -> None:
        """So many bytes were just freed."""
        self._waiting_bytes += nbytes
        if self._waiting_bytes >= self._every_bytes:
            self.trim()

    def trim(self) -> None:
        """Give back what there is."""
        self._waiting_bytes = 0
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(ctypes.c_size_t(0))
