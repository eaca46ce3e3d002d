"""How much device memory state may take on its visit: what activations leave under their peak.

The engine measures it (`forebay.engine.room`); this is the forecast of the same rule. State comes
up during the last backward, when the loss's activations are gone, and is on the device together
until the clip factor is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.plan.device_peak import SHARE_OF_PEAK
from forebay.plan.tiers import tier_bytes

if TYPE_CHECKING:
    from forebay.model.shape import ModelShape
    from forebay.plan.setup import Setup

__all__ = ["visit_room"]


def visit_room(shape: ModelShape, setup: Setup, *, waiting: int, corrected: float = 1.0) -> int:
    """Bytes of the device for state that visits, gradients that stay with it included.

    Args:
        shape: The model.
        setup: How it trains, with optimizer state on the host.
        waiting: Bytes of gradients that may wait for the link meanwhile.
        corrected: As in `tier_bytes`.
    """
    tiers = tier_bytes(shape, setup, corrected=corrected)
    usable = int(SHARE_OF_PEAK * tiers.total("device"))
    return max(0, usable - tiers.placed_on_device - waiting)
