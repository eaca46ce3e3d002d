"""From a model, its groups and options to units with memory: everything before the first step.

It refuses what does not fit before any model memory is touched.
"""

from __future__ import annotations

import mmap
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from forebay.engine.files import open_files
from forebay.engine.options import EngineOptions, SumPlace
from forebay.engine.part import PartStorage
from forebay.engine.policies import places_for, policy_for, sums_on_device
from forebay.engine.record import ParamRecord
from forebay.engine.state_memory import PartMemory
from forebay.engine.unit import Unit
from forebay.errors import UnsupportedError
from forebay.hardware.affinity import CoreShare, Topology
from forebay.hardware.limits import machine_bytes
from forebay.model.inspect import OUTSIDE
from forebay.model.layout import layout_unit
from forebay.model.unbuilt import UnbuiltWeight, put_in_place, value_of
from forebay.plan.file_pieces import held_pieces
from forebay.plan.file_places import with_files
from forebay.plan.memory import ring_bytes
from forebay.plan.placement import (
    Accumulation,
    AccumulationOrder,
    Placement,
    UnitPlacement,
    UpdatePlace,
    WeightPlace,
)
from forebay.plan.solve import choose_places
from forebay.tiers.heap import HeapTrimmer
from forebay.tiers.host import HostArena
from forebay.tiers.ledger import Ledger, Role, Tier
from forebay.tiers.page_locking import PageLocking

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from forebay.accelerators.base import Accelerator
    from forebay.model.inspect import InspectedModel
    from forebay.model.spec import ModelSpec

__all__ = [
    "accumulation_for",
    "build_units",
    "core_share",
    "move_the_rest",
    "page_locking",
    "part_memory",
    "place",
    "ring_maker",
]


def accumulation_for(options: EngineOptions) -> Accumulation:
    """How addends are summed under these options."""
    if options.backwards is None or options.backwards == 1:
        return Accumulation.SINGLE
    # Over ranks a sum is made where the slices of the others arrive.
    together = options.order is AccumulationOrder.LAYER
    on_device = options.sum_place is SumPlace.DEVICE or sums_on_device(options.policy) or together
    if on_device or options.sharding.size > 1:
        return Accumulation.DEVICE_SUM
    return Accumulation.HOST_SUM


def _update_places(
    spec: ModelSpec, options: EngineOptions, device: torch.device
) -> Sequence[UpdatePlace]:
    if options.places is not None:
        return options.places(spec)
    if options.update is not None:
        return [options.update] * len(spec.units)
    if device.type == "cpu":
        return [UpdatePlace.HOST] * len(spec.units)
    return choose_places(
        spec, rates=options.rates, backwards=options.backwards or 1, weights=options.weights
    )


def _weight_place(update: UpdatePlace, options: EngineOptions) -> WeightPlace:
    weights = WeightPlace.DEVICE if update is UpdatePlace.DEVICE else options.weights
    if weights is WeightPlace.NVME:  # `with_files` says which of them are in files
        weights = WeightPlace.HOST
    spread = options.spreads_weights and weights is WeightPlace.DEVICE
    return WeightPlace.RANKS if spread else weights


def place(model: InspectedModel, *, options: EngineOptions, device: torch.device) -> Placement:
    """The placement that the options ask for; see `with_pool` for streamed weights' room."""
    spec = model.spec
    places = places_for(options, _update_places(spec, options, device))
    stay = options.loads.stay([unit.elements for unit in spec.units])
    units = tuple(
        UnitPlacement(
            layout=layout_unit(
                unit.name, index=index, params=unit.params, world_size=options.sharding.size
            ),
            update=place,
            weights=WeightPlace.DEVICE if stays else _weight_place(place, options),
        )
        for index, (unit, place, stays) in enumerate(zip(spec.units, places, stay, strict=True))
    )
    frozen = tuple(
        UnitPlacement(
            layout=layout_unit(
                unit.name, index=index, params=unit.params, world_size=options.sharding.size
            ),
            update=UpdatePlace.HOST,
            weights=_weight_place(UpdatePlace.HOST, options),
        )
        for index, unit in enumerate(model.frozen.units, start=len(units))
    )
    placement = Placement(
        units=units,
        frozen=frozen,
        accumulation=accumulation_for(options),
        backwards_per_update=options.backwards_per_update,
        bf16_master=options.bf16_master,
        piece_elements=options.piece_elements,
        sharding=options.sharding,
        policy=policy_for(options),
        loads=options.loads,
        order=options.order,
        micro_batches=options.micro_batches,
    )
    if options.nvme is None:
        if any(unit.update is UpdatePlace.NVME for unit in units):
            raise UnsupportedError("state is to be in files, and no folder is given for them")
        return placement
    machine = machine_bytes()
    sharers = 1 if options.group is None else options.group.local_size
    return with_files(
        placement,
        replace(options.nvme.wants, machine_bytes=machine and machine // sharers),
        weights=options.weights,
        host_budget=options.own_state_budget,
        device_page_bytes=mmap.PAGESIZE if device.type == "cpu" else 1,
    )


def build_units(
    model: InspectedModel,
    *,
    placement: Placement,
    memory: PartMemory,
) -> tuple[Unit, ...]:
    """Allocate every unit and move the parameters' values into it.

    The peak is the model plus its largest parameter, since values move one by one and the memory
    that they leave goes back to the system; parameters that are not built yet take none before.

    Args:
        model: The model.
        placement: Where everything lives.
        memory: Where memory comes from.
    """
    units, held_of = [], held_pieces(placement)
    # 64 calls at most; what waits for one of them is a few percent of the model.
    heap = HeapTrimmer(every_bytes=max(_host_bytes(model.params) // 64, 8 << 20))
    for unit_placement, unit_spec in zip(placement.units, model.spec.units, strict=True):
        group_of = {param.index: param.group for param in unit_spec.params}
        parts, records = [], []
        held = held_of[unit_placement.layout.index]
        for layout, count in zip(unit_placement.layout.parts, held, strict=True):
            part = PartStorage(
                layout,
                placement=placement,
                update=unit_placement.update,
                weights=unit_placement.weights,
                memory=memory,
                held=count,
            )
            parts.append(part)
            records.append(
                [
                    ParamRecord(
                        model.params[slot.index],
                        slot=slot,
                        part=part,
                        unit=unit_placement.layout.index,
                        group=group_of[slot.index],
                    )
                    for slot in layout.slots
                ]
            )
        unit = Unit(
            unit_placement, parts=parts, records=records, accumulation=placement.accumulation
        )
        unit.eager = unit_spec.name == OUTSIDE
        for record in unit.records:
            left_bytes = _host_bytes([record.param])
            unit.bind(record)
            heap.freed(left_bytes)
            if not record.part.high_is_weight and record.part.files is None:
                record.part.set_master(record.slot, record.param.data)
            record.rebase()
        for part in unit.parts:
            if part.weight_files is not None:
                part.weight_files.fill_blanks()
            if part.files is not None:
                part.files.begin(part.read_own_weights, elements=part.elements)
        units.append(unit)
    heap.trim()
    return tuple(units)


def _host_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.nbytes for t in tensors if t.device.type == "cpu")


def move_the_rest(
    model: nn.Module,
    *,
    trained: Sequence[nn.Parameter],
    device: torch.device,
    cast_to: torch.dtype | None = None,
) -> None:
    """Move frozen parameters and buffers to the device, each in place of its old value.

    Args:
        model: The model.
        trained: What has been moved already.
        device: Where to.
        cast_to: What float32 parameters become; buffers keep their dtype.
    """
    heap = HeapTrimmer(every_bytes=64 << 20)
    known = {id(param) for param in trained}
    for param in model.parameters():
        if id(param) in known:
            continue
        cast = cast_to is not None and param.dtype is torch.float32
        dtype = cast_to if cast else param.dtype
        left_bytes = _host_bytes([param])
        value = value_of(param)
        if isinstance(param, UnbuiltWeight):
            put_in_place(param, value.to(device, dtype))
            continue
        moved = value.to(device, dtype)
        if moved is not value:
            del value
            param.data = moved
            heap.freed(left_bytes)
    for buffer in model.buffers():
        if buffer.device != device:
            buffer.data = buffer.data.to(device)


def page_locking(options: EngineOptions, *, accelerator: Accelerator, core: Any) -> PageLocking:
    """The policy for what crosses the link; locks nothing on `cpu`, nor where nobody asks."""
    locks = options.page_lock and accelerator.device.type != "cpu"
    return PageLocking(accelerator.copy_engine(core) if locks else None)


def ring_maker(placement: Placement, *, memory: PartMemory) -> Callable[[], HostArena]:
    """Makes the ring's memory; no reference to the engine, which must be free to die."""

    def _make() -> HostArena:
        return HostArena(
            ring_bytes(placement),
            ledger=memory.ledger,
            role=Role.STAGING,
            what="gradients on their way to fp32 sums",
            page_locking=memory.page_locking,
        )

    return _make


def part_memory(
    placement: Placement, *, options: EngineOptions, accelerator: Accelerator, core: Any
) -> PartMemory:
    """Where parts take their memory from, files included, under the budgets that are set."""
    nvme = options.nvme
    ledger = Ledger(
        {
            Tier.DEVICE: options.device_budget,
            Tier.HOST: options.own_host_budget,
            Tier.NVME: None if nvme is None else nvme.budget,
        }
    )
    return PartMemory(
        accelerator=accelerator,
        ledger=ledger,
        page_locking=page_locking(options, accelerator=accelerator, core=core),
        files=open_files(placement, nvme, ledger=ledger, core=core, device=accelerator.device),
    )


def core_share(options: EngineOptions) -> CoreShare:
    """The cores that updates run on."""
    topology = Topology.read()
    group = options.group
    if group is None:
        share = topology.share()
    else:
        share = topology.share(group.local_rank, local_ranks=group.local_size)
    if options.threads is not None and options.threads > share.threads:
        summary = f"{options.threads} update threads"
        return CoreShare(threads=options.threads, cpus=share.cpus, summary=summary)
    if options.threads is not None:
        return share.limited(options.threads)
    if options.core_share is not None:
        return share.limited(int(options.core_share * topology.usable_cores()))
    return share
