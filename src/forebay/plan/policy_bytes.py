"""What a policy's own memory takes of each part, by tier and role, beside the placement's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.plan.policies import Delayed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forebay.plan.placement import Placement, UpdatePlace

__all__ = ["policy_bytes"]

_LANDING = (("host", "lp_grads"), ("host", "contiguous_grad_buffer"))


def policy_bytes(
    sizes: Mapping[tuple[str, str], int], *, placement: Placement, update: UpdatePlace
) -> dict[tuple[str, str], int]:
    """Bytes of one part that come to `sizes`, its own.

    Args:
        sizes: The part's bytes without a policy, in whole pages.
        placement: The model's placement.
        update: Where the part's unit updates.
    """
    if isinstance(placement.policy, Delayed) and update.lands:
        # one gradient is being used while the next one lands
        return {key: sizes[key] for key in _LANDING if key in sizes}
    return {}
