"""Device bytes that exchanges between ranks pass through."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.model.layout import ITEM_BYTES, SUM_ITEM_BYTES
from forebay.plan.placement import Accumulation, WeightPlace

if TYPE_CHECKING:
    from forebay.plan.placement import Placement, UnitPlacement

__all__ = ["exchange_bytes"]

# One exchange runs while the next one's gradient is packed.
_IN_FLIGHT = 2


def exchange_bytes(placement: Placement) -> int:
    """Room for the largest unit's gradients, sent and received, and for a gather of its weights.

    Twice, since two units are under way at a time. The sums that remain are gradients, not room.
    """
    if placement.sharding.size == 1 or not placement.units:
        return 0
    gradients = max(_gradient_bytes(unit, placement) for unit in placement.units)
    every = (*placement.units, *placement.frozen)
    gathered = [u for u in every if u.weights is not WeightPlace.DEVICE]
    weights = max((_weight_bytes(unit, placement) for unit in gathered), default=0)
    return _IN_FLIGHT * 2 * gradients + weights


def _gradient_bytes(unit: UnitPlacement, placement: Placement) -> int:
    wide = placement.accumulation is not Accumulation.SINGLE
    return sum(
        (SUM_ITEM_BYTES if wide else ITEM_BYTES[part.dtype]) * part.elements
        for part in unit.layout.parts
    )


def _weight_bytes(unit: UnitPlacement, placement: Placement) -> int:
    """The flat part that a gather fills, and this rank's slice of it on the device."""
    return sum(
        ITEM_BYTES[part.dtype] * (part.elements + placement.sharding.own(part).elements)
        for part in unit.layout.parts
    )
