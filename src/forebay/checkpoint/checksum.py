"""The checksums of a checkpoint's bytes: they find damage, not intent.

CRC-32C is what is written: processors compute it faster than memory is read. CRC-32 is what
version 1 of the format has, and is read still.
"""

from __future__ import annotations

import zlib
from enum import Enum

import numpy as np

from forebay import native

__all__ = ["Checksum"]


class Checksum(Enum):
    """A way to sum bytes; its value is its name in a manifest."""

    CRC32 = "crc32"
    """zlib's; 1 GB/s a core."""
    CRC32C = "crc32c"
    """Castagnoli's; 12 GB/s a core by the processor's instruction, 2 by tables."""

    def of(self, data: bytes | bytearray | memoryview, seed: int = 0) -> int:
        """The sum of bytes that follow bytes of the sum `seed` (0: none). Releases the GIL."""
        if self is Checksum.CRC32:
            return zlib.crc32(data, seed)
        view = np.frombuffer(data, np.uint8)
        value: int = native.core().crc32c(view.ctypes.data, view.nbytes, seed)
        return value
