"""What a shard holds of a parameter, of flat and of parameter-shaped tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.model.layout import Segment

if TYPE_CHECKING:
    import torch

    from forebay.model.layout import ParamSlot, Shard

__all__ = ["answered_for", "held_of", "share_of"]


def held_of(flat: torch.Tensor, slot: ParamSlot, *, segment: Segment) -> torch.Tensor:
    """What a flat role of a shard holds of a parameter: in its shape, or flat if not all."""
    held = flat[segment.offset : segment.end]
    return held.view(slot.shape) if segment.elements == slot.elements else held


def share_of(value: torch.Tensor, slot: ParamSlot, *, segment: Segment) -> torch.Tensor:
    """What a shard holds of a parameter-shaped tensor (or of that), in the form of `held_of`."""
    if value.numel() == segment.elements != slot.elements:
        return value.reshape(-1)
    if segment.elements == slot.elements:
        return value.reshape(slot.shape)
    return value.reshape(-1)[segment.start : segment.start + segment.elements]


def answered_for(held: Segment, *, own: Shard) -> Segment:
    """What no other rank answers for of a segment; offsets are those of the shard."""
    first = min(max(held.offset, own.start), held.end)
    last = max(first, min(held.end, own.end))
    return Segment(first, last - first, held.start + first - held.offset)
