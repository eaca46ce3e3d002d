"""Units whose state stays on the device, as far as there is room, while the rest is elsewhere.

What stays moves nothing. The share that is left to the host, or to host memory and drives, is what
a configuration says (`offload_optimizer.ratio`), so that these units are the forward's first ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.model.layout import SUM_ITEM_BYTES
from forebay.plan.placement import UpdatePlace
from forebay.plan.setup import Home

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.model.shape import ModelShape
    from forebay.plan.setup import Setup

__all__ = ["host_share", "resident_places"]


def resident_places(shape: ModelShape, setup: Setup, *, free: int) -> tuple[UpdatePlace, ...]:
    """Update places with as many units resident as have room.

    Args:
        shape: The model.
        setup: With optimizer state on the host, or there and on drives.
        free: Bytes of the device that nothing else takes at its peak.
    """
    work, ranks = setup.workload, setup.ranks
    item = work.precision.item_bytes
    own = work.precision.master_bytes + work.state.moments
    # its gradient stays too: in its own dtype, or as a sum over passes or ranks
    own += SUM_ITEM_BYTES if ranks > 1 or work.backwards > 1 else item
    if setup.weights is not Home.DEVICE:
        own += item
    share = ranks if setup.stage else 1
    places = []
    for elements in shape.unit_elements():
        free -= own * -(-elements // share)
        places.append(UpdatePlace.DEVICE if free >= 0 else UpdatePlace.HOST)
    return tuple(places)


def host_share(shape: ModelShape, places: Sequence[UpdatePlace]) -> float:
    """Share of the state that is left to the host; 1 where nothing is resident.

    Example:
        >>> from forebay.plan.model_config import from_counts
        >>> host_share(from_counts(1e9), [])
        1.0
    """
    sizes = shape.unit_elements()
    stays = sum(
        size for size, place in zip(sizes, places, strict=False) if place is UpdatePlace.DEVICE
    )
    return 1 - stays / sum(sizes)
