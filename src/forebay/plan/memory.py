"""Bytes that a placement takes, by tier and role: the same numbers that the engine reserves.

Source of the figures: law 5 of the design (14 bytes of host memory per trainable parameter for
16-bit weights and one backward per update, 16 with fp32 sums) and the parts' padded lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.model.layout import ITEM_BYTES
from forebay.plan.placement import Accumulation, MasterLayout, UpdatePlace

if TYPE_CHECKING:
    from forebay.model.layout import PartLayout
    from forebay.plan.placement import Placement

__all__ = ["forecast", "part_bytes"]

_MOMENT_BYTES = 8  # two fp32 moments
_SUM_BYTES = 4


def part_bytes(
    part: PartLayout, *, placement: Placement, update: UpdatePlace
) -> dict[tuple[str, str], int]:
    """Bytes of one part by (tier, role), with the names of `Tier` and `Role` values."""
    item, n = ITEM_BYTES[part.dtype], part.elements
    master = placement.master_layout(part.dtype)
    sizes: dict[tuple[str, str], int] = {("device", "lp_params"): item * n}
    if update is not UpdatePlace.DEVICE:
        sizes["host", "hp_params"] = 4 * n
        sizes["host", "optim_states"] = _MOMENT_BYTES * n
        if placement.accumulation is Accumulation.SINGLE:
            sizes["host", "lp_grads"] = item * n
        else:
            sizes["host", "contiguous_grad_buffer"] = _SUM_BYTES * n
    else:
        extra = {MasterLayout.WEIGHT: 0, MasterLayout.SPLIT: 2, MasterLayout.WHOLE: 4}[master]
        sizes["device", "hp_params"] = extra * n
        sizes["device", "optim_states"] = _MOMENT_BYTES * n
    return {key: value for key, value in sizes.items() if value}


def forecast(placement: Placement) -> dict[tuple[str, str], int]:
    """Bytes of the whole placement by (tier, role), staging not included."""
    total: dict[tuple[str, str], int] = {}
    for unit in placement.units:
        for part in unit.layout.parts:
            for key, value in part_bytes(part, placement=placement, update=unit.update).items():
                total[key] = total.get(key, 0) + value
    return total
