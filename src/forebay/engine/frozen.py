"""Frozen weights off the device: they come and go with the others, and nothing ever changes them.

They have neither masters, moments nor gradients; a unit of them is what residency and hooks ask a
unit for, and no more. A user may write them, as any weight (`load_state_dict`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from forebay.engine.homes import own_tensor
from forebay.engine.part import TORCH_DTYPES, PartStorage
from forebay.engine.record import ParamRecord
from forebay.engine.shares import answered_for, held_of, share_of
from forebay.engine.unit import Unit
from forebay.engine.weight_memory import WeightMemory
from forebay.model.frozen import with_frozen
from forebay.model.inspect import inspect_model
from forebay.plan.placement import WeightPlace
from forebay.tiers.heap import HeapTrimmer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from forebay.engine.options import EngineOptions
    from forebay.engine.state_memory import PartMemory
    from forebay.model.inspect import InspectedModel
    from forebay.model.layout import ParamSlot, PartLayout, Segment
    from forebay.plan.placement import Placement

__all__ = ["FrozenPart", "build_frozen", "look_at"]

# A group of no optimizer.
_NO_GROUP = -1


def look_at(
    model: nn.Module, *, groups: list[dict[str, Any]], options: EngineOptions
) -> InspectedModel:
    """The model's trained parameters and, where they come and go, its frozen ones.

    Raises:
        UnsupportedError: See `inspect_model`.
    """
    inspected = inspect_model(
        model,
        groups=groups,
        unit_elements=options.unit_elements,
        whole=options.whole_modules,
        cast_to=options.cast_to,
    )
    if not options.streams_frozen:
        return inspected
    return with_frozen(
        inspected, model, unit_elements=options.unit_elements, cast_to=options.cast_to
    )


class FrozenPart:
    """The memory of one part of frozen weights: where they live, and a home on the device.

    Args:
        layout: The part.
        placement: The model's placement.
        weights: Where they live.
        memory: Where memory comes from.
    """

    def __init__(
        self,
        layout: PartLayout,
        *,
        placement: Placement,
        weights: WeightPlace,
        memory: PartMemory,
    ) -> None:
        self.layout = layout
        self.shard = placement.sharding.state(layout)
        self.own = self.shard.inner(placement.sharding.own(layout))
        self.segments = {slot.index: self.shard.segment(slot) for slot in layout.slots}
        self.dtype = TORCH_DTYPES[layout.dtype]
        self.device = memory.device
        self._memory = WeightMemory(
            layout, placement=placement, place=weights, in_master=None, memory=memory
        )
        self.home = self._memory.home
        self.weights = self.own_weights = self._memory.flat
        self.loads: list[Any] = []
        self.ticket = self.low = self.files = self.weight_files = None
        self.is_sharded = self.elements != layout.elements
        self.stores_on_host = weights is WeightPlace.HOST
        self.high_is_weight = True
        self._own: dict[int, torch.Tensor] = {}

    @property
    def elements(self) -> int:
        """Elements that are held here: all, or this rank's shard of them."""
        return self.shard.elements

    @property
    def last_tickets(self) -> list[Any]:
        """Nothing writes these weights."""
        return []

    def await_readers(self) -> None:
        """A checkpoint in progress keeps what it reads by the tensor's version."""

    def weight(self, slot: ParamSlot) -> torch.Tensor:
        """As `PartStorage.weight`."""
        assert self.home is not None
        return self.home.tensor(slot)

    def stored(self, slot: ParamSlot) -> torch.Tensor:
        """As `PartStorage.stored`."""
        if self.is_sharded:
            return held_of(self.weights, slot, segment=self.segments[slot.index])
        own = self._own.get(slot.index)
        if own is None:
            own = self._own[slot.index] = own_tensor(self.weights, slot)
        return own

    def store(self, slot: ParamSlot, value: torch.Tensor) -> None:
        """As `PartStorage.store`."""
        value = value.detach()
        if self.is_sharded:
            value = share_of(value, slot, segment=self.segments[slot.index])
        self.stored(slot).copy_(value)

    def read_own_weights(self, begin: int, end: int) -> torch.Tensor:
        """As `PartStorage.read_own_weights`."""
        return self.own_weights[begin:end]

    def write_own_weights(self, begin: int, values: torch.Tensor) -> None:
        """As `PartStorage.write_own_weights`."""
        self._memory.write(begin, values)

    def own_segment(self, slot: ParamSlot) -> Segment:
        """As `PartStorage.own_segment`."""
        return answered_for(self.segments[slot.index], own=self.own)

    def close(self) -> None:
        """Let go of the memory; it lives on while parameters view it."""
        self._own.clear()
        if self.home is not None:
            self.home.close()
        self._memory.close()
        self.weights = self.own_weights = torch.empty(0)


def build_frozen(
    params: Sequence[nn.Parameter],
    *,
    placement: Placement,
    memory: PartMemory,
) -> tuple[Unit, ...]:
    """Allocate every unit of frozen weights and move their values into it, one by one.

    Args:
        params: Parameters by index, the trained ones first.
        placement: Which units there are.
        memory: Where memory comes from.
    """
    units = []
    heap = HeapTrimmer(every_bytes=64 << 20)
    for frozen in placement.frozen:
        parts, records = [], []
        for layout in frozen.layout.parts:
            # It has all that a unit whose weights come and go is asked for.
            part = cast(
                "PartStorage",
                FrozenPart(layout, placement=placement, weights=frozen.weights, memory=memory),
            )
            parts.append(part)
            records.append(
                [
                    ParamRecord(
                        params[slot.index],
                        slot=slot,
                        part=part,
                        unit=frozen.layout.index,
                        group=_NO_GROUP,
                    )
                    for slot in layout.slots
                ]
            )
        unit = Unit(frozen, parts=parts, records=records, accumulation=placement.accumulation)
        for record in unit.records:
            left = record.param.nbytes if record.param.device.type == "cpu" else 0
            unit.bind(record)
            heap.freed(left)
            record.rebase()
        units.append(unit)
    heap.trim()
    return tuple(units)
