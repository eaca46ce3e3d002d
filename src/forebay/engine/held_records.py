"""The records of one part's state that stay in host memory and have no place in its file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay.plan.memory import piece_bytes
from forebay.tiers.ledger import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.engine.state_memory import PartMemory
    from forebay.plan.records import Record

__all__ = ["HeldRecords"]


class HeldRecords:
    """Memory of a part's first records of state, each with room for new weights behind it.

    Args:
        records: Those that are held, from the part's first one on.
        dtype: Of the part's weights, as in `ITEM_BYTES`.
        memory: Ledger and page-locking policy.

    Example:
        >>> from forebay.accelerators.cpu import CpuAccelerator
        >>> from forebay.engine.state_memory import PartMemory
        >>> from forebay.plan.records import records
        >>> from forebay.tiers.ledger import Ledger
        >>> from forebay.tiers.page_locking import PageLocking
        >>> memory = PartMemory(
        ...     accelerator=CpuAccelerator(), ledger=Ledger(), page_locking=PageLocking(None))
        >>> held = HeldRecords(records(10, piece_elements=64), dtype="float32", memory=memory)
        >>> held.role(0, 2, first=4, last=6).tolist()
        [0.0, 0.0]
        >>> held.close()
    """

    def __init__(self, records: Sequence[Record], *, dtype: str, memory: PartMemory) -> None:
        self._records = tuple(records)
        self._offsets = [0]
        for record in records:
            self._offsets.append(self._offsets[-1] + piece_bytes(record.elements, dtype))
        self._arena = memory.host_arena(
            self._offsets[-1], role=Role.STAGING, what="state that stays out of files"
        )

    def __len__(self) -> int:
        """How many."""
        return len(self._records)

    @property
    def file_bytes(self) -> int:
        """What they would take in the file."""
        return sum(record.nbytes for record in self._records)

    def address(self, index: int) -> int:
        """Where a record begins."""
        return self._arena.address + self._offsets[index]

    def role(self, index: int, number: int, *, first: int, last: int) -> torch.Tensor:
        """Elements of one role of a record where they lie; zeros from the beginning.

        Args:
            index: The record.
            number: The role's place in the record.
            first: First element, in the record.
            last: One past the last.
        """
        record = self._records[index]
        offset = self._offsets[index] + number * record.role_bytes + record.form.item_bytes * first
        return self._arena.tensor(torch.float32, offset_bytes=offset, elements=last - first)

    def close(self) -> None:
        """Give the memory back; the lanes are closed. Idempotent."""
        self._arena.close()
