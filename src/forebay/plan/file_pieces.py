"""The pieces that state in files comes in, and which of them buffers hold for good."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.plan.placement import UpdatePlace
from forebay.plan.records import record_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.model.layout import PartLayout
    from forebay.plan.placement import Placement, UnitPlacement

__all__ = ["held_pieces", "piece_count", "pieces"]


def piece_count(unit: UnitPlacement, placement: Placement) -> int:
    """How many pieces this rank's state of a unit has, where it is in files."""
    return sum(_counts(unit, placement))


def pieces(placement: Placement) -> Iterator[tuple[PartLayout, int]]:
    """The part and the elements of every piece, in module order."""
    most = placement.buffers.piece_elements
    for unit in placement.units:
        for part, count in zip(unit.layout.parts, _counts(unit, placement), strict=True):
            elements = placement.sharding.state(part).elements
            for number in range(count):
                yield part, min(most, elements - number * most)


def held_pieces(placement: Placement) -> dict[int, tuple[int, ...]]:
    """Of each unit, by index, how many pieces of each part buffers hold: the model's first ones."""
    left, found = placement.buffers.held, {}
    for unit in placement.units:
        held = [0] * len(unit.layout.parts)
        if left:
            for number, count in enumerate(_counts(unit, placement)):
                held[number] = min(left, count)
                left -= held[number]
        found[unit.layout.index] = tuple(held)
    return found


def _counts(unit: UnitPlacement, placement: Placement) -> list[int]:
    """Of each part."""
    if unit.update is not UpdatePlace.NVME:
        return [0] * len(unit.layout.parts)
    return [
        record_count(
            placement.sharding.state(part).elements,
            piece_elements=placement.buffers.piece_elements,
        )
        for part in unit.layout.parts
    ]
