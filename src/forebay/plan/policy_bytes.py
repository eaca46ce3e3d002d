"""What a policy's own memory takes of each part, by tier and role, beside the placement's."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from forebay.model.column_slice import ColumnSlice, compact_offsets
from forebay.model.layout import ITEM_BYTES, SUM_ITEM_BYTES
from forebay.plan.placement import MasterLayout, UpdatePlace, WeightPlace
from forebay.plan.policies import Delayed, Speculative
from forebay.plan.zenflow import ZenFlow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forebay.model.layout import PartLayout
    from forebay.plan.placement import Placement
    from forebay.plan.policies import Policy

__all__ = ["policy_bytes", "speculates"]

_STATE = (("host", "hp_params"), ("host", "optim_states"))
_LANDING = (("host", "lp_grads"), ("host", "contiguous_grad_buffer"))


def policy_bytes(
    part: PartLayout,
    *,
    sizes: Mapping[tuple[str, str], int],
    placement: Placement,
    update: UpdatePlace,
    weights: WeightPlace,
) -> dict[tuple[str, str], int]:
    """Bytes of one part that come to `sizes`, its own.

    Args:
        part: The part.
        sizes: Its bytes without a policy, in whole pages.
        placement: The model's placement.
        update: Where the part's unit updates.
        weights: Where its weights live.
    """
    if isinstance(placement.policy, Delayed) and update.lands:
        # one gradient is being used while the next one lands
        return {key: sizes[key] for key in _LANDING if key in sizes}
    if speculates(placement.policy, update=update, weights=weights):
        second = {key: sizes[key] for key in _STATE}
        if placement.master_layout(part.dtype, update=update) is MasterLayout.WHOLE:
            # the gradient stays, so new weights cannot lie over it
            elements = placement.sharding.state(part).elements
            nbytes = ITEM_BYTES[part.dtype] * elements
            second["host", "lp_params"] = _pages(nbytes)
        return second
    if isinstance(placement.policy, ZenFlow) and update is UpdatePlace.HOST:
        return _zenflow_bytes(part, placement=placement, policy=placement.policy)
    return {}


def _zenflow_bytes(
    part: PartLayout, *, placement: Placement, policy: ZenFlow
) -> dict[tuple[str, str], int]:
    """Compact state of important columns, and sums of what is gathered of the rest."""
    shard = placement.sharding.state(part)
    slices = []
    for slot in part.slots:
        segment = shard.segment(slot)
        slices.append(ColumnSlice.of(slot.shape, start=segment.start, elements=segment.elements))
    _, elements = compact_offsets(slices, share=policy.topk_ratio)
    tier = "host" if policy.keeps_state_on_host else "device"
    buffers = 2 if policy.overlaps else 1
    return {
        (tier, "hp_params"): _pages(4 * elements),
        (tier, "optim_states"): 2 * _pages(4 * elements),
        ("host", "contiguous_grad_buffer"): buffers * _pages(SUM_ITEM_BYTES * shard.elements),
    }


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def speculates(policy: Policy, *, update: UpdatePlace, weights: WeightPlace) -> bool:
    """Whether a unit in these places has a second state: on the host, its weights elsewhere."""
    on_host = update is UpdatePlace.HOST and weights is not WeightPlace.HOST
    return isinstance(policy, Speculative) and on_host
