"""How much device memory staging may take at this moment.

Activations come first: staging lives in what they leave free, under the largest use that the
process has had at once, so that a longer sequence never meets memory that we filled.

[Note: a place to stay] The next forward keeps its activations around what is staged, in the
smallest piece that has room; its loss then asks for few and large pieces at once. In steps that
keep much, staging lies behind what they keep. After a step that keeps little it would lie in that
very place, and the next long step's activations behind it, in the middle of what the loss needs.
So staging goes where it went when it lay furthest behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from forebay.plan.device_peak import SHARE_OF_PEAK
from forebay.tiers.ledger import Role, Tier

if TYPE_CHECKING:
    from forebay.tiers.ledger import Ledger

__all__ = ["NO_HOLE", "DeviceRoom", "Hole"]


# Smaller pieces are left to activations.
_LEAST_HOLE_BYTES = 64 << 20
# The device's memory comes in pages of this size.
_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Hole:
    """Memory that the allocator has and nobody uses.

    Attributes:
        nbytes: How much.
        address: Where it begins; None for what the device would have to give first.
    """

    nbytes: int
    address: int | None = None


NO_HOLE = Hole(0)


@dataclass(frozen=True, slots=True)
class _Use:
    """What the allocator has given out and taken from the device, now and at most."""

    allocated: int
    most_allocated: int
    reserved: int
    most_reserved: int

    @classmethod
    def of(cls, device: torch.device) -> _Use:
        """Read once: each of torch's own four questions sorts all of its statistics."""
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        given, taken = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return cls(given["current"], given["peak"], taken["current"], taken["peak"])


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
        self._largest = NO_HOLE
        self._furthest = 0  # address of what was staged in the largest hole

    def _staged_bytes(self) -> int:
        return self._ledger.bytes(Tier.DEVICE, Role.STAGING)

    def observe(self) -> None:
        """A window has ended; the first one's peak becomes the mark."""
        if self._measured and self._peak is None:
            use = _Use.of(self._device)
            self._peak, self._most_reserved = use.most_allocated, use.most_reserved

    def emptied(self) -> None:
        """Nothing is staged until `free_bytes` is asked: a higher peak by then is activations'."""
        if self._measured and not self._staged_bytes():
            self._peak_when_empty = _Use.of(self._device).most_allocated

    def is_tight(self) -> bool:
        """Whether activations beside staging have reached the mark."""
        if not self._measured or self._peak is None:
            return False
        return _Use.of(self._device).allocated > self._mark()

    def _mark(self) -> int:
        return int(SHARE_OF_PEAK * (self._peak or 0))

    def holes(self) -> list[Hole]:
        """Blocks that take no new memory from the device, largest first.

        What the allocator has is in pieces; a block that is larger than each of them would be
        added to what the process has reserved.
        """
        if not self._measured:
            return [Hole(1 << 62)]
        stream = torch.cuda.current_stream(self._device).cuda_stream
        found = [Hole(max(0, self._most_reserved - _Use.of(self._device).reserved))]
        for segment in torch.cuda.memory_snapshot():
            if segment["device"] == self._device.index and segment["stream"] == stream:
                found += _holes_of(segment)
        found.sort(key=lambda hole: hole.nbytes, reverse=True)
        self._largest = found[0]
        return found

    def take(self, nbytes: int, *, hole: Hole) -> torch.Tensor:
        """A block of a hole; see [Note: a place to stay]."""
        below = self._below(nbytes, hole)
        block = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        del below
        if hole is self._largest:
            self._furthest = max(self._furthest, block.data_ptr())
        return block

    def _below(self, nbytes: int, hole: Hole) -> torch.Tensor | None:
        """Memory to hold while a block is taken, so that the block lies behind it."""
        if hole.address is None or hole is not self._largest:
            return None
        last = hole.address + (hole.nbytes - nbytes) // _PAGE_BYTES * _PAGE_BYTES
        spare = min(self._furthest, last) - hole.address
        # what is held is under the mark too: it makes no new peak
        if spare <= 0 or _Use.of(self._device).allocated + spare + nbytes > self._mark():
            return None
        return torch.empty(spare, dtype=torch.uint8, device=self._device)

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
            use = _Use.of(self._device)
            seen = self._seen_when_empty(use.most_allocated)
            self._peak = max(self._peak, use.allocated - self._staged_bytes(), seen)
            bounds.append(self._mark() - use.allocated)
        return min(bounds, default=1 << 62)

    def _seen_when_empty(self, now: int) -> int:
        """The peak since `emptied`, where it was higher than any before; else 0."""
        before, self._peak_when_empty = self._peak_when_empty, None
        return 0 if before is None or now <= before else now


def _holes_of(segment: dict[str, Any]) -> list[Hole]:
    found, address = [], segment["address"]
    for block in segment["blocks"]:
        if block["state"] == "inactive" and block["size"] >= _LEAST_HOLE_BYTES:
            found.append(Hole(block["size"], address))
        address += block["size"]
    return found
