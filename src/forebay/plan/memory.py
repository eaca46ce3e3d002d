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

__all__ = ["backlog_bytes", "forecast", "part_bytes"]

_MOMENT_BYTES = 8  # two fp32 moments
_SUM_BYTES = 4
_BACKLOG_BYTES = 1 << 30


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


def backlog_bytes(placement: Placement) -> int:
    """Gradient bytes that may wait on the device for the link before backward waits for it.

    Two of the largest units keep the link busy while the next gradient is computed. Beyond that
    an eighth of all, at most 1 GiB, evens out units of unequal size.
    """
    wide = placement.accumulation is Accumulation.DEVICE_SUM
    sizes = [
        sum((_SUM_BYTES if wide else ITEM_BYTES[part.dtype]) * part.elements for part in parts)
        for parts in (u.layout.parts for u in placement.units if u.update is not UpdatePlace.DEVICE)
    ]
    return max(2 * max(sizes, default=0), min(sum(sizes) // 8, _BACKLOG_BYTES))
