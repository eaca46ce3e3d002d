"""Device bytes that exchanges between ranks pass through."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from forebay.model.layout import ITEM_BYTES, SUM_ITEM_BYTES
from forebay.plan.home_bytes import streamed_bytes
from forebay.plan.placement import Accumulation, WeightPlace
from forebay.plan.unit_bytes import slice_bytes

if TYPE_CHECKING:
    from forebay.plan.placement import Placement, UnitPlacement

__all__ = ["exchange_bytes"]

# One exchange runs while the next one's gradient is packed.
_PACKED, _ARRIVING = 2, 1


def exchange_bytes(placement: Placement) -> int:
    """Room for the largest unit's gradients, sent and received, and for a gather of its weights.

    Two units are packed at a time, and of one of them the others' slices arrive. The sums that
    remain are gradients, not room.
    Slices of weights in files are read ahead for as many units as the pool has room for.
    """
    if placement.sharding.size == 1 or not placement.units:
        return 0
    gradients = max(_gradient_bytes(unit, placement) for unit in placement.units)
    every = (*placement.units, *placement.frozen)
    gathered = [u for u in every if u.weights is not WeightPlace.DEVICE]
    weights = max((_weight_bytes(unit, placement) for unit in gathered), default=0)
    return (_PACKED + _ARRIVING) * gradients + weights + _ahead_bytes(placement)


def _gradient_bytes(unit: UnitPlacement, placement: Placement) -> int:
    # where ranks keep no sums of their own, addends are exchanged after every backward
    sums = placement.accumulation is not Accumulation.SINGLE
    wide = sums and placement.keeps_local_sums
    return sum(
        (SUM_ITEM_BYTES if wide else ITEM_BYTES[part.dtype]) * part.elements
        for part in unit.layout.parts
    )


def _ahead_bytes(placement: Placement) -> int:
    """At the most: those first whose padded slices are large beside what the pool counts."""
    in_files = [unit for unit in placement.units if unit.weights is WeightPlace.NVME]
    sizes = [(slice_bytes(unit, placement), streamed_bytes(unit.layout)) for unit in in_files]
    left, total = placement.pool_bytes, 0.0
    for own, home in sorted(sizes, key=lambda size: size[0] / max(1, size[1]), reverse=True):
        share = min(1.0, left / home) if home else 1.0
        total += share * own
        left -= int(share * home)
    return math.ceil(total)


def _weight_bytes(unit: UnitPlacement, placement: Placement) -> int:
    """The flat part that a gather fills, and this rank's slice of it on the device."""
    return sum(
        ITEM_BYTES[part.dtype] * (part.elements + placement.sharding.own(part).elements)
        for part in unit.layout.parts
    )
