"""Bytes of one unit that cross a link, seen from this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.model.layout import ITEM_BYTES, SUM_ITEM_BYTES
from forebay.plan.placement import Accumulation
from forebay.plan.records import records_bytes, weight_form

if TYPE_CHECKING:
    from forebay.plan.placement import Placement, UnitPlacement

__all__ = [
    "load_bytes",
    "slice_bytes",
    "state_bytes",
    "sum_bytes",
    "unit_bytes",
    "weight_file_bytes",
    "whole_bytes",
]


def unit_bytes(unit: UnitPlacement, placement: Placement, item_bytes: int | None = None) -> int:
    """Bytes of what this rank holds of a unit's parameters, without padding."""
    return sum(
        placement.sharding.state(part).segment(slot).elements
        * (item_bytes or ITEM_BYTES[part.dtype])
        for part in unit.layout.parts
        for slot in part.slots
    )


def state_bytes(unit: UnitPlacement, placement: Placement) -> int:
    """Bytes that a streamed unit's state moves each way, padding included."""
    return sum(
        placement.streamed_item_bytes(part.dtype, weights=unit.weights)
        * placement.sharding.state(part).elements
        for part in unit.layout.parts
    )


def load_bytes(unit: UnitPlacement, placement: Placement) -> int:
    """Bytes that a load of a unit's weights brings up: over ranks a slice, padding included."""
    if not placement.gathers_weights:
        return unit_bytes(unit, placement)
    return slice_bytes(unit, placement)


def whole_bytes(unit: UnitPlacement) -> int:
    """Bytes of all ranks' slices of a unit's weights, padding included."""
    return sum(ITEM_BYTES[part.dtype] * part.elements for part in unit.layout.parts)


def slice_bytes(unit: UnitPlacement, placement: Placement) -> int:
    """Bytes of this rank's slice of a unit's weights, padding included."""
    return sum(
        ITEM_BYTES[part.dtype] * placement.sharding.own(part).elements for part in unit.layout.parts
    )


def weight_file_bytes(unit: UnitPlacement, placement: Placement) -> int:
    """Bytes of a unit's weights in files, padding included."""
    return sum(
        records_bytes(
            placement.sharding.state(part).elements,
            piece_elements=placement.buffers.piece_elements,
            form=weight_form(part.dtype),
        )
        for part in unit.layout.parts
    )


def sum_bytes(unit: UnitPlacement, placement: Placement) -> int:
    """Bytes of fp32 sums on the host that come up with a streamed unit's state."""
    if placement.accumulation is not Accumulation.HOST_SUM or placement.backwards_per_update < 2:
        return 0
    return sum(
        SUM_ITEM_BYTES * placement.sharding.state(part).elements for part in unit.layout.parts
    )
