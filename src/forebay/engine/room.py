"""How much device memory staging may take at this moment.

Activations come first: staging lives in what they leave free, under the largest use that the
process has had at once, so that a longer sequence never meets memory that we filled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay.plan.device_peak import SHARE_OF_PEAK
from forebay.tiers.ledger import Role, Tier

if TYPE_CHECKING:
    from forebay.tiers.ledger import Ledger

__all__ = ["DeviceRoom"]


# Smaller pieces are left to activations.
_LEAST_HOLE_BYTES = 64 << 20


class DeviceRoom:
    """Free bytes for staging.

    The first window stages nothing, so that its peak is what forward and backward need alone.
    Later ones raise the mark only by what they use beside staging; a peak in the loss, which comes
    and goes between two looks, is seen by its trace, once everything staged had gone home before.

    Args:
        device: The device.
        ledger: Its budget bounds what is placed, staging included.
        staging_bytes: Upper bound on staging; None for what the activations leave free.
    """

    def __init__(
        self, device: torch.device, *, ledger: Ledger, staging_bytes: int | None = None
    ) -> None:
        self._device = device
        self._ledger = ledger
        self._staging = staging_bytes
        self._measured = device.type == "cuda"
        self._peak: int | None = None
        self._peak_when_empty: int | None = None
        self._most_reserved = 0

    def _staged_bytes(self) -> int:
        return self._ledger.bytes(Tier.DEVICE, Role.STAGING)

    def observe(self) -> None:
        """A window has ended; the first one's peak becomes the mark."""
        if self._measured and self._peak is None:
            self._peak = torch.cuda.max_memory_allocated(self._device)
            self._most_reserved = torch.cuda.max_memory_reserved(self._device)

    def emptied(self) -> None:
        """Nothing is staged until `free_bytes` is asked: a higher peak by then is activations'."""
        if self._measured and not self._staged_bytes():
            self._peak_when_empty = torch.cuda.max_memory_allocated(self._device)

    def is_tight(self) -> bool:
        """Whether activations beside staging have reached the mark."""
        if not self._measured or self._peak is None:
            return False
        return torch.cuda.memory_allocated(self._device) > self._mark()

    def _mark(self) -> int:
        return int(SHARE_OF_PEAK * (self._peak or 0))

    def holes(self) -> list[int]:
        """Sizes of blocks that take no new memory from the device, largest first.

        What the allocator has is in pieces; a block that is larger than each of them would be
        added to what the process has reserved.
        """
        if not self._measured:
            return [1 << 62]
        stream = torch.cuda.current_stream(self._device).cuda_stream
        sizes = [
            block["size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == self._device.index and segment["stream"] == stream
            for block in segment["blocks"]
            if block["state"] == "inactive" and block["size"] >= _LEAST_HOLE_BYTES
        ]
        new = self._most_reserved - torch.cuda.memory_reserved(self._device)
        return sorted([*sizes, max(0, new)], reverse=True)

    def free_bytes(self) -> int:
        """Bytes that may be staged now."""
        bounds = []
        if self._staging is not None:
            bounds.append(self._staging - self._staged_bytes())
        budget = self._ledger.budget(Tier.DEVICE)
        if budget is not None:
            bounds.append(budget - self._ledger.bytes(Tier.DEVICE))
        if self._measured:
            if self._peak is None:
                return 0
            allocated = torch.cuda.memory_allocated(self._device)
            self._peak = max(self._peak, allocated - self._staged_bytes(), self._seen_when_empty())
            bounds.append(self._mark() - allocated)
        return min(bounds, default=1 << 62)

    def _seen_when_empty(self) -> int:
        """The peak since `emptied`, where it was higher than any before; else 0."""
        before, self._peak_when_empty = self._peak_when_empty, None
        now = torch.cuda.max_memory_allocated(self._device)
        return 0 if before is None or now <= before else now
