"""How a shard's state lies in a file: pieces, each one record of three fp32 roles.

A record holds master, first and second moment of its elements one after another, each padded to
whole sectors. Checksums cover `SUM_ELEMENTS` elements of one role. Arithmetic alone; no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["ROLES", "SECTOR_BYTES", "SUM_ELEMENTS", "Record", "records", "sum_bytes"]

ROLES: Final = ("master", "exp_avg", "exp_avg_sq")
SECTOR_BYTES: Final = 4096
# The native core's `SUM_ELEMENTS`, which a test compares.
SUM_ELEMENTS: Final = 64 * 1024

_ITEM_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One piece of a shard.

    Attributes:
        begin: First element, in the shard.
        elements: How many.
        offset: First byte, from the shard's first record on.
    """

    begin: int
    elements: int
    offset: int

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.begin + self.elements

    @property
    def role_bytes(self) -> int:
        """Bytes of one role and its padding; roles follow each other at this distance."""
        return _sectors(_ITEM_BYTES * self.elements)

    @property
    def nbytes(self) -> int:
        """Bytes of the three roles with their padding."""
        return len(ROLES) * self.role_bytes

    @property
    def first_sum(self) -> int:
        """Index of its first checksum, in the shard's list of them."""
        return self.begin // SUM_ELEMENTS * len(ROLES)


def _sectors(nbytes: int) -> int:
    return -(-nbytes // SECTOR_BYTES) * SECTOR_BYTES


def records(elements: int, *, piece_elements: int) -> tuple[Record, ...]:
    """The records of a shard.

    Args:
        elements: Elements of the shard; 0 has no record.
        piece_elements: Of a piece, a multiple of `SUM_ELEMENTS`.
    """
    found: list[Record] = []
    offset = 0
    for begin in range(0, elements, piece_elements):
        record = Record(begin=begin, elements=min(piece_elements, elements - begin), offset=offset)
        found.append(record)
        offset += record.nbytes
    return tuple(found)


def sum_bytes(elements: int) -> int:
    """Bytes of a shard's checksums."""
    return -(-elements // SUM_ELEMENTS) * len(ROLES) * 4
