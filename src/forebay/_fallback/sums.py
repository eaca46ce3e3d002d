"""Checksums: a CRC-32C for each role of every `SUM_ELEMENTS` elements of state, or for blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay._fallback import memory
from forebay._fallback.checksum import crc32c

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay._fallback.pool import PartState

__all__ = ["SUM_ELEMENTS", "BlockSums", "StateSums"]

SUM_ELEMENTS = 64 * 1024
_ROLES = ("master", "exp_avg", "exp_avg_sq")


class StateSums:
    """The sums of one part, as uint32 in memory.

    Args:
        part: The part.
        address: Of the sums.
        names: Of the segments, for messages.
        piece_elements: Elements of a piece of the update.

    Raises:
        ValueError: A block would lie in two pieces, or the names are not the segments'.
    """

    def __init__(
        self, part: PartState, *, address: int, names: Sequence[str], piece_elements: int
    ) -> None:
        if names and len(names) != len(part.segments):
            raise ValueError(f"names has {len(names)} entries for {len(part.segments)} segments")
        self._part = part
        self._names = names
        self._blocks = -(-part.elements // SUM_ELEMENTS) if address else 0
        if not address:
            return
        memory.check_address("sums", address=address, item=4)
        if piece_elements % SUM_ELEMENTS and piece_elements < part.elements:
            raise ValueError(
                f"piece_elements is {piece_elements}, which must be a multiple of the "
                f"{SUM_ELEMENTS} elements of a checksum"
            )
        self._sums = memory.view(address, dtype=torch.int32, elements=self._blocks * len(_ROLES))

    def _sum(self, block: int, role: str) -> int:
        part = self._part
        begin = block * SUM_ELEMENTS
        count = min(SUM_ELEMENTS, part.elements - begin)
        if role == "master" and part.master_layout == "split":
            high = crc32c(part.master + 2 * begin, 2 * count)
            return crc32c(part.low + 2 * begin, 2 * count, high)
        return crc32c(int(getattr(part, role)) + 4 * begin, 4 * count)

    def blocks(self, segments: Sequence[int]) -> list[int]:
        """The blocks that hold elements of these segments."""
        touched: set[int] = set()
        for index in segments:
            offset, elements = self._part.segments[index]
            if elements and self._blocks:
                first, last = offset // SUM_ELEMENTS, (offset + elements - 1) // SUM_ELEMENTS
                touched.update(range(first, last + 1))
        return sorted(touched)

    def verify(self, blocks: Sequence[int]) -> None:
        """Raise RuntimeError when a block is not what its sums say."""
        for block in blocks:
            for index, role in enumerate(_ROLES):
                now = self._sum(block, role)
                then = int(self._sums[block * len(_ROLES) + index]) & 0xFFFFFFFF
                if now != then:
                    raise _different(f"{role} of {self._names_in(block)}", now, then)

    def seal(self, blocks: Sequence[int]) -> None:
        """Sum what blocks hold now."""
        for block in blocks:
            for index, role in enumerate(_ROLES):
                value = self._sum(block, role)
                self._sums[block * len(_ROLES) + index] = _signed(value)

    def _names_in(self, block: int) -> str:
        begin, end = block * SUM_ELEMENTS, (block + 1) * SUM_ELEMENTS
        inside = [
            name
            for name, (offset, elements) in zip(self._names, self._part.segments, strict=False)
            if offset < end and offset + elements > begin
        ]
        return ", ".join(inside[:3]) or f"elements from {begin} on"


class BlockSums:
    """The sums of some bytes, one for each block.

    Args:
        action: "store" or "compare".
        address: Of the bytes.
        nbytes: How many.
        block_bytes: Of a block; the last one is shorter.

    Raises:
        ValueError: There is no such action, or a block has no bytes.
    """

    def __init__(self, action: str, *, address: int, nbytes: int, block_bytes: int) -> None:
        if action not in ("store", "compare"):
            raise ValueError(f"unknown action {action!r}\nhint: store or compare")
        if block_bytes < 1:
            raise ValueError("a checksum's block needs at least 1 byte, not 0")
        self._action = action
        self._spans = [
            (address + begin, min(block_bytes, nbytes - begin))
            for begin in range(0, nbytes, block_bytes)
        ]

    def run(self, *, sums: int, names: Sequence[str]) -> None:
        """Write the sums, or raise RuntimeError where a block is not what they say."""
        if not self._spans:
            return
        held = memory.view(sums, dtype=torch.int32, elements=len(self._spans))
        for block, (address, count) in enumerate(self._spans):
            now, then = crc32c(address, count), int(held[block]) & 0xFFFFFFFF
            if self._action == "store":
                held[block] = _signed(now)
            elif now != then:
                raise _different(names[block] if names else "a block", now, then)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def _different(what: str, now: int, then: int) -> RuntimeError:
    return RuntimeError(
        f"{what} is not what was written: its CRC-32C is {now:08x}, and was {then:08x}"
    )
