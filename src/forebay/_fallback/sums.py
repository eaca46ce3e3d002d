"""Checksums of state: one CRC-32C for master and both moments of every `SUM_ELEMENTS` elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay._fallback import memory
from forebay._fallback.checksum import crc32c

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay._fallback.pool import PartState

__all__ = ["SUM_ELEMENTS", "StateSums"]

SUM_ELEMENTS = 64 * 1024


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
        self._sums = memory.view(address, dtype=torch.int32, elements=self._blocks)

    def _sum(self, block: int) -> int:
        part = self._part
        begin = block * SUM_ELEMENTS
        count = min(SUM_ELEMENTS, part.elements - begin)
        split = part.master_layout == "split"
        roles = [(part.master, 2), (part.low, 2)] if split else [(part.master, 4)]
        value = 0
        for base, item in [*roles, (part.exp_avg, 4), (part.exp_avg_sq, 4)]:
            value = crc32c(base + begin * item, count * item, value)
        return value

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
        """Raise RuntimeError when a block is not what its sum says."""
        for block in blocks:
            now, then = self._sum(block), int(self._sums[block]) & 0xFFFFFFFF
            if now != then:
                raise RuntimeError(
                    f"the state of {self._names_in(block)} is not what was written: its CRC-32C is "
                    f"{now:08x}, and was {then:08x}"
                )

    def seal(self, blocks: Sequence[int]) -> None:
        """Sum what blocks hold now."""
        for block in blocks:
            value = self._sum(block)
            self._sums[block] = value - (1 << 32) if value >> 31 else value

    def _names_in(self, block: int) -> str:
        begin, end = block * SUM_ELEMENTS, (block + 1) * SUM_ELEMENTS
        inside = [
            name
            for name, (offset, elements) in zip(self._names, self._part.segments, strict=False)
            if offset < end and offset + elements > begin
        ]
        return ", ".join(inside[:3]) or f"elements from {begin} on"
