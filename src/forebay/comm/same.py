"""Whether all ranks say the same: one number each while they do, their texts once they do not.

Numbers travel with what ranks tell each other anyway; texts go through a slow exchange.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.comm.group import Group

__all__ = ["different_texts", "mark_of"]


def mark_of(text: str) -> float:
    """What a rank tells in place of a text."""
    return float(zlib.crc32(text.encode()))


def different_texts(text: str, *, marks: Sequence[float], group: Group, what: str) -> list[str]:
    """Every rank's text by rank, or nothing where all marks are the same.

    Every rank calls it with the same marks, so that all of them exchange texts or none.

    Args:
        text: This rank's.
        marks: Every rank's `mark_of`, by rank.
        group: The ranks.
        what: What this rank is about to do, for messages.

    Raises:
        RankError: A rank is gone.
    """
    if len(set(marks)) == 1:
        return []
    return group.compare(text, what=what)
