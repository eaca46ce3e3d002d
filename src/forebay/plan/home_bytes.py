"""Device bytes of weights that come and go, while they are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.model.layout import ITEM_BYTES

if TYPE_CHECKING:
    from forebay.model.layout import PartLayout, UnitLayout

__all__ = ["home_bytes", "streamed_bytes"]

# What device allocators round each allocation up to.
_ALLOCATION_BYTES = 512


def home_bytes(part: PartLayout) -> int:
    """Device bytes of a streamed part's weights while they are there: one allocation each."""
    item = ITEM_BYTES[part.dtype]
    return sum(
        -(-item * slot.elements // _ALLOCATION_BYTES) * _ALLOCATION_BYTES for slot in part.slots
    )


def streamed_bytes(unit: UnitLayout) -> int:
    """Device bytes of a streamed unit's weights while they are there."""
    return sum(home_bytes(part) for part in unit.parts)
