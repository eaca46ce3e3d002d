"""The pieces that state in files comes in, and which of them buffers hold for good."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.plan.placement import UpdatePlace
from forebay.plan.records import record_count

if TYPE_CHECKING:
    from forebay.plan.placement import Placement, UnitPlacement

__all__ = ["held_pieces", "piece_count"]


def piece_count(unit: UnitPlacement, placement: Placement) -> int:
    """How many pieces this rank's state of a unit has, where it is in files."""
    if unit.update is not UpdatePlace.NVME:
        return 0
    return sum(
        record_count(
            placement.sharding.state(part).elements,
            piece_elements=placement.buffers.piece_elements,
        )
        for part in unit.layout.parts
    )


def held_pieces(placement: Placement) -> dict[int, int]:
    """Of each unit, by index, how many pieces buffers hold: the first ones in module order."""
    left, found = placement.buffers.held, {}
    for unit in placement.units:
        found[unit.layout.index] = min(left, piece_count(unit, placement))
        left -= found[unit.layout.index]
    return found
