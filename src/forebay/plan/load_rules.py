"""What bounds the weights that come and go, beside the room for them. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LoadRules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRules:
    """Limits; None is none.

    Attributes:
        ahead_bytes: Weights that have come before their use: no more are brought once they are so
            many, so that one unit always comes where this is not 0.
        reuse_bytes: A unit goes after its use where more than these are used before it is again.
        persistent_elements: Units of at most so many elements stay on the device for good.
        persistent_total: As long as they are no more together.
    """

    ahead_bytes: int | None = None
    reuse_bytes: int | None = None
    persistent_elements: int | None = None
    persistent_total: int | None = None

    def stay(self, elements: Sequence[int]) -> tuple[bool, ...]:
        """Which units stay, given their elements: small ones in order, while there is room."""
        left = self.persistent_total
        chosen = []
        for size in elements:
            small = self.persistent_elements is not None and size <= self.persistent_elements
            stays = small and (left is None or size <= left)
            if stays and left is not None:
                left -= size
            chosen.append(stays)
        return tuple(chosen)
