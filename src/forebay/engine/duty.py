"""What one rank alone answers for in a checkpoint: it saves that, and verifies it before a load.

A rank's slice of the state, or a part of it where several copies of the state hold the same slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.model.layout import SHARDED_ALIGNMENT_ELEMENTS, Segment

if TYPE_CHECKING:
    from forebay.comm.group import Group
    from forebay.engine.record import ParamRecord

__all__ = ["Duty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Duty:
    """One rank among those that save.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        copy: Which copy of the state it helps to hold.
        copies: How many there are.
    """

    rank: int = 0
    size: int = 1
    copy: int = 0
    copies: int = 1

    @classmethod
    def of(cls, group: Group | None) -> Duty:
        """This rank of a group; None is a process that trains alone."""
        if group is None:
            return cls()
        copies = group.size // len(group.sharers)
        return cls(rank=group.rank, size=group.size, copy=group.copy, copies=copies)

    def segment(self, record: ParamRecord) -> Segment:
        """Its elements of a parameter; offsets are those of the state that is held here.

        Where copies share a slice they cut it at whole pages of every role.
        """
        own = record.part.own_segment(record.slot)
        share = -(-own.elements // self.copies)
        share += -share % SHARDED_ALIGNMENT_ELEMENTS if self.copies > 1 else 0
        first = min(self.copy * share, own.elements)
        last = min(first + share, own.elements)
        return Segment(own.offset + first, last - first, own.start + first)
