"""How a shard lies in a file: pieces, each one record of one or several roles.

A record of state holds master, first and second moment of its elements one after another, one of
weights holds those alone; each role is padded to whole sectors. Checksums cover `SUM_ELEMENTS`
elements of one role. Arithmetic alone; no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.model.layout import ITEM_BYTES

__all__ = [
    "ROLES",
    "SECTOR_BYTES",
    "STATE",
    "SUM_ELEMENTS",
    "WEIGHT",
    "Record",
    "RecordForm",
    "record_count",
    "records",
    "records_bytes",
    "sum_bytes",
    "weight_form",
]

ROLES: Final = ("master", "exp_avg", "exp_avg_sq")
SECTOR_BYTES: Final = 4096
# The native core's `SUM_ELEMENTS`, which a test compares.
SUM_ELEMENTS: Final = 64 * 1024
# The one role of a record of weights.
WEIGHT: Final = "weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordForm:
    """What a record holds of each element.

    Attributes:
        roles: In their order.
        dtype: Of all of them.
    """

    roles: tuple[str, ...]
    dtype: str

    @property
    def item_bytes(self) -> int:
        """Bytes of an element of one role."""
        return ITEM_BYTES[self.dtype]


STATE: Final = RecordForm(roles=ROLES, dtype="float32")


def weight_form(dtype: str) -> RecordForm:
    """Records of working weights."""
    return RecordForm(roles=(WEIGHT,), dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One piece of a shard.

    Attributes:
        begin: First element, in the shard.
        elements: How many.
        offset: First byte, from the shard's first record on.
        form: What it holds.
    """

    begin: int
    elements: int
    offset: int
    form: RecordForm = STATE

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.begin + self.elements

    @property
    def role_bytes(self) -> int:
        """Bytes of one role and its padding; roles follow each other at this distance."""
        return _sectors(self.form.item_bytes * self.elements)

    @property
    def nbytes(self) -> int:
        """Bytes of all roles with their padding."""
        return len(self.form.roles) * self.role_bytes

    @property
    def first_sum(self) -> int:
        """Index of its first checksum, in the shard's list of them."""
        return self.begin // SUM_ELEMENTS * len(self.form.roles)


def _sectors(nbytes: int) -> int:
    return -(-nbytes // SECTOR_BYTES) * SECTOR_BYTES


def records(elements: int, *, piece_elements: int, form: RecordForm = STATE) -> tuple[Record, ...]:
    """The records of a shard.

    Args:
        elements: Elements of the shard; 0 has no record.
        piece_elements: Of a piece, a multiple of `SUM_ELEMENTS`.
        form: What they hold.
    """
    found: list[Record] = []
    offset = 0
    for begin in range(0, elements, piece_elements):
        count = min(piece_elements, elements - begin)
        record = Record(begin=begin, elements=count, offset=offset, form=form)
        found.append(record)
        offset += record.nbytes
    return tuple(found)


def record_count(elements: int, *, piece_elements: int) -> int:
    """How many records a shard has."""
    return -(-elements // piece_elements)


def records_bytes(elements: int, *, piece_elements: int, form: RecordForm = STATE) -> int:
    """Bytes of the records of a shard, as `records` would sum up to.

    Example:
        >>> records_bytes(10, piece_elements=4) == sum(
        ...     one.nbytes for one in records(10, piece_elements=4)
        ... )
        True
    """
    full, rest = divmod(elements, piece_elements)
    each = full * _sectors(form.item_bytes * piece_elements) + _sectors(form.item_bytes * rest)
    return len(form.roles) * each


def sum_bytes(elements: int, form: RecordForm = STATE) -> int:
    """Bytes of a shard's checksums."""
    return -(-elements // SUM_ELEMENTS) * len(form.roles) * 4
