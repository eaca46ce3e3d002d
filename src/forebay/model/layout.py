"""Where every parameter lies: pure arithmetic over offsets, paddings and rank slices.

A *unit* holds one *part* per working dtype. A part is one flat space of elements that is the
same in every role (weight, gradient, master, moments) and on every tier, so that an element has
one offset wherever it lives. Every parameter starts at a multiple of 256 elements: 512 bytes
for 2-byte roles and more for 4-byte roles, so that the same kernels are chosen in every layout.
With several shards it is 4,096, and shards are multiples of it: a shard then never cuts a block of
the tree that squares are summed by (`forebay.optim.squares`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.model.spec import ParamSpec

__all__ = [
    "ALIGNMENT_ELEMENTS",
    "ITEM_BYTES",
    "SHARDED_ALIGNMENT_ELEMENTS",
    "SUM_ITEM_BYTES",
    "ParamSlot",
    "PartLayout",
    "Segment",
    "Shard",
    "UnitLayout",
    "layout_unit",
]

# 512 bytes (the widest alignment that device kernels test for) / 2 bytes of the smallest dtype.
ALIGNMENT_ELEMENTS = 256
# `forebay.optim.squares.BLOCK`, which a test compares.
SHARDED_ALIGNMENT_ELEMENTS = 4096

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Several addends are summed in fp32.
SUM_ITEM_BYTES = 4


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSlot:
    """One parameter's place in its part.

    Attributes:
        index: Position of the parameter in the model's list of trainable parameters.
        names: All of its names in the module tree (tied weights have several), first one first.
        shape: The parameter's shape; `()` for a 0-dim one.
        offset: First element in the part's flat space.
        elements: Number of elements; 0 for an empty parameter.
    """

    index: int
    names: tuple[str, ...]
    shape: tuple[int, ...]
    offset: int
    elements: int

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.offset + self.elements


class Segment(NamedTuple):
    """The piece of one parameter that a shard holds.

    Attributes:
        offset: First element in the shard.
        elements: Number of elements; 0 where the shard holds none of the parameter.
        start: First element in the parameter, flat.
    """

    offset: int
    elements: int
    start: int

    @property
    def end(self) -> int:
        """One past the last element in the shard."""
        return self.offset + self.elements


class Shard(NamedTuple):
    """A range `[start, end)` of a part's flat space."""

    start: int
    end: int

    @property
    def elements(self) -> int:
        """Its length."""
        return self.end - self.start

    def inner(self, other: Shard) -> Shard:
        """Where `other` lies in this one, which must contain it."""
        return Shard(other.start - self.start, other.end - self.start)

    def segment(self, slot: ParamSlot) -> Segment:
        """What it holds of a parameter."""
        first = min(max(self.start, slot.offset), self.end)
        last = max(first, min(self.end, slot.end))
        start = min(max(0, first - slot.offset), slot.elements)
        return Segment(first - self.start, last - first, start)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLayout:
    """The parameters of one unit that share a working dtype, in one flat space.

    Attributes:
        dtype: Working dtype of the weights, as in `ITEM_BYTES`.
        slots: The parameters in order of offset.
        elements: Length of the flat space, padding included; divisible by `world_size`.
        world_size: Number of shards.
    """

    dtype: str
    slots: tuple[ParamSlot, ...]
    elements: int
    world_size: int

    @property
    def parameter_elements(self) -> int:
        """Elements that are parameters, without padding."""
        return sum(slot.elements for slot in self.slots)

    @property
    def whole(self) -> Shard:
        """All of it."""
        return Shard(0, self.elements)

    def shard(self, rank: int) -> Shard:
        """One rank's slice."""
        size = self.elements // self.world_size
        return Shard(rank * size, (rank + 1) * size)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLayout:
    """The layout of one unit: one part per working dtype."""

    name: str
    index: int
    parts: tuple[PartLayout, ...]

    @property
    def parameter_elements(self) -> int:
        """Elements of all parts that are parameters."""
        return sum(part.parameter_elements for part in self.parts)


def layout_unit(
    name: str, *, index: int, params: Sequence[ParamSpec], world_size: int = 1
) -> UnitLayout:
    """Lay out one unit's trainable parameters.

    Args:
        name: The unit's name.
        index: The unit's position in the model.
        params: Its trainable parameters, in model order.
        world_size: Number of shards; every part is padded to a multiple of it times the
            alignment of parameters.

    Returns:
        A layout with one part per working dtype, in order of first appearance.
    """
    alignment = ALIGNMENT_ELEMENTS if world_size == 1 else SHARDED_ALIGNMENT_ELEMENTS
    by_dtype: dict[str, list[ParamSpec]] = {}
    for param in params:
        by_dtype.setdefault(param.dtype, []).append(param)
    parts = []
    for dtype, members in by_dtype.items():
        slots, offset = [], 0
        for param in members:
            elements = math.prod(param.shape)
            slots.append(
                ParamSlot(
                    index=param.index,
                    names=param.names,
                    shape=param.shape,
                    offset=offset,
                    elements=elements,
                )
            )
            offset += _round_up(elements, alignment)
        total = _round_up(offset, alignment * world_size)
        parts.append(
            PartLayout(dtype=dtype, slots=tuple(slots), elements=total, world_size=world_size)
        )
    return UnitLayout(name=name, index=index, parts=tuple(parts))
