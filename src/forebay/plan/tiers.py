"""Bytes of a setup by tier and role: on each device, on each node's host, on each node's drives.

They are the engine's own forecast, to the byte. For optimizers that it does not run, and devices
that share each layer, the formulas of the ZeRO papers with forebay's bytes; for other systems those
with the habits that are asked for.

[Note: ZeRO's formulas] With M parameters on N devices: stage 1 keeps 4M + 12M/N bytes on each,
stage 2 2M + 14M/N, stage 3 16M/N; with the optimizer on the host 2M + 2M/N and 2M/N. Stage 3
computes in gathered layers. On the host a node keeps 14M / nodes: fp32 master and moments, and the
gradient that landed; 16M / nodes with fp32 sums of several backwards. Weights on the host are the
high halves of its split masters and add nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forebay.model.layout import layout_unit
from forebay.plan.activations import activations, moved_inputs, peak_bytes
from forebay.plan.device_peak import DevicePeak, PeakWalk
from forebay.plan.file_places import FileWants, with_files
from forebay.plan.memory import forecast
from forebay.plan.placement import (
    Accumulation,
    AccumulationOrder,
    Placement,
    Sharding,
    UnitPlacement,
    UpdatePlace,
    WeightPlace,
)
from forebay.plan.pool_size import with_default_pool
from forebay.plan.setup import FOREBAY, Home

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from forebay.hardware.profile import Profile
    from forebay.model.layout import UnitLayout
    from forebay.model.shape import ModelShape
    from forebay.plan.activations import Activations
    from forebay.plan.merged import Merged
    from forebay.plan.setup import Setup

__all__ = [
    "Capacity",
    "TierBytes",
    "accumulation_of",
    "capacity",
    "holding",
    "in_engine",
    "placement_of",
    "tier_bytes",
]

# The driver's context, cuBLAS and NCCL workspaces.
_CONTEXT_BYTES = 1 << 30
# What the caching allocator cannot use: blocks are rounded and memory is cut in pieces.
_USABLE_DEVICE = 0.95
# The operating system, the page cache and the data loader want the rest.
_USABLE_HOST = 0.9
_USABLE_DRIVES = 0.9
# Weights of so many units are on the device at once when they are gathered or streamed: one at
# work, one arriving.
_UNITS_AT_ONCE = 2
# As in `plan.memory.backlog_bytes`.
_BACKLOG_SHARE = 16
_BACKLOG_BYTES = 1 << 30
# What comes and goes with a pass.
_PASSING = ("activations", "lp_grads", "visits")
# buffer_count x buffer_size records of state on their way to and from drives.
_NVME_BUFFER_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBytes:
    """What a setup takes.

    Attributes:
        device: On each device by role.
        host: On each node's host by role.
        nvme: On each node's drives by role.
    """

    device: Mapping[str, int]
    host: Mapping[str, int]
    nvme: Mapping[str, int]

    def total(self, tier: str) -> int:
        """All of a tier: "device", "host" or "nvme"."""
        roles: Mapping[str, int] = getattr(self, tier)
        return sum(roles.values())

    @property
    def placed_on_device(self) -> int:
        """Of each device, what forebay places there for good: all but what torch computes with."""
        return sum(size for role, size in self.device.items() if role not in _PASSING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a machine can give: bytes of each device, of the host, of the drives."""

    device: int
    host: int
    nvme: int


def capacity(profile: Profile) -> Capacity:
    """What a machine gives to training, after what others on it need."""
    node, drives = profile.node, profile.drives
    assert node is not None
    device = int((node.device_bytes - _CONTEXT_BYTES) * _USABLE_DEVICE)
    if profile.machine.device == "cpu":
        device = int(node.device_bytes * _USABLE_HOST)
    return Capacity(
        device=max(0, device),
        host=int(node.host_bytes * _USABLE_HOST),
        nvme=int(drives.capacity_bytes * _USABLE_DRIVES) if drives else 0,
    )


def holding(profile: Profile, short: Mapping[str, int]) -> dict[str, int]:
    """What each tier that is short would have to be: its bytes as they are sold.

    Args:
        profile: The machine.
        short: Bytes that are missing of what `capacity` gives, by tier.
    """
    given = capacity(profile)
    host = int((given.host + short.get("host", 0)) / _USABLE_HOST) + 1
    device = int((given.device + short.get("device", 0)) / _USABLE_DEVICE) + 1 + _CONTEXT_BYTES
    drives = int((given.nvme + short.get("nvme", 0)) / _USABLE_DRIVES) + 1
    sizes = {"device": device, "host": host, "nvme": drives}
    return {tier: sizes[tier] for tier in short}


def accumulation_of(setup: Setup) -> Accumulation:
    """How addends of a window are summed."""
    if setup.workload.accumulation == 1:
        return Accumulation.SINGLE
    # Over ranks a sum is made where the slices of the others arrive; in layer order a unit's is
    # complete before the next unit's begins.
    together = setup.workload.order is AccumulationOrder.LAYER
    return Accumulation.DEVICE_SUM if setup.ranks > 1 or together else Accumulation.HOST_SUM


def in_engine(setup: Setup) -> bool:
    """Whether the engine's own placement and program describe a setup."""
    work = setup.workload
    return (
        setup.habits == FOREBAY
        and bool(work.state.built)
        and work.tensor_parallel == 1
        and (setup.weights is Home.DEVICE or setup.stage == 3)
        and (setup.weights is not Home.NVME or setup.optimizer is Home.NVME)
    )


def placement_of(
    shape: ModelShape,
    setup: Setup,
    *,
    places: Sequence[UpdatePlace] | None = None,
    merged: Merged | None = None,
) -> Placement:
    """The engine's placement of a setup, seen from the first rank.

    Args:
        shape: The model.
        setup: As `in_engine` says.
        places: Where each unit updates; None for where the optimizer's state lives.
        merged: Units that are taken for one, and so are `places`; None for each by itself.
    """
    dtype = setup.workload.precision.dtype
    layouts = _layouts(shape, dtype, ranks=setup.ranks, merged=merged)
    one = UpdatePlace(setup.optimizer.value)
    chosen = places or [one] * len(layouts)
    placement = Placement(
        units=tuple(
            UnitPlacement(layout=layout, update=place, weights=_weight_place(setup, place))
            for layout, place in zip(layouts, chosen, strict=True)
        ),
        accumulation=accumulation_of(setup),
        backwards_per_update=setup.workload.backwards,
        order=setup.workload.order,
        micro_batches=setup.workload.micro_batches_at_once,
        sharding=Sharding(rank=0, size=setup.ranks, stage=setup.stage),
    )
    if one is UpdatePlace.NVME:
        placement = _in_files(setup, placement)
    return with_default_pool(placement)


@functools.lru_cache(maxsize=16)
def _layouts(
    shape: ModelShape, dtype: str, *, ranks: int, merged: Merged | None
) -> tuple[UnitLayout, ...]:
    """Of all units; a planner asks for the same ones again and again."""
    spec = shape.spec(dtype) if merged is None else merged.spec(shape.spec(dtype))
    return tuple(
        layout_unit(unit.name, index=index, params=unit.params, world_size=ranks)
        for index, unit in enumerate(spec.units)
    )


def _weight_place(setup: Setup, update: UpdatePlace) -> WeightPlace:
    """Units that are updated where they compute have their weights there, or a slice of them."""
    weights = WeightPlace(setup.weights.value)
    if update is UpdatePlace.DEVICE:
        weights = WeightPlace.DEVICE
    spread = setup.stage == 3 and setup.ranks > 1 and weights is WeightPlace.DEVICE
    return WeightPlace.RANKS if spread else weights


def _in_files(setup: Setup, placement: Placement) -> Placement:
    """With the state on drives that the host budget has no room for, as the engine would."""
    budget = setup.host_budget
    chosen = WeightPlace(setup.weights.value)
    in_memory = tuple(
        replace(
            unit,
            update=UpdatePlace.HOST if unit.update is UpdatePlace.NVME else unit.update,
            weights=WeightPlace.HOST if unit.weights is WeightPlace.NVME else unit.weights,
        )
        for unit in placement.units
    )
    return with_files(
        replace(placement, units=in_memory),
        FileWants(weights_in_memory_elements=setup.weights_in_memory),
        weights=chosen,
        host_budget=None if budget is None else budget // setup.cluster.devices_per_node,
        device_page_bytes=1,
    )


def tier_bytes(
    shape: ModelShape,
    setup: Setup,
    *,
    corrected: float = 1.0,
    places: Sequence[UpdatePlace] = (),
) -> TierBytes:
    """What a setup takes.

    Args:
        shape: The model.
        setup: How it trains.
        corrected: What runs taught of activations; they are multiplied by it.
        places: Where each unit updates, for state on the host: what visits the device takes a part
            of it. None of it without.
    """
    return _tier_bytes(shape, setup, corrected, tuple(places))


@functools.lru_cache(maxsize=256)
def _tier_bytes(
    shape: ModelShape, setup: Setup, corrected: float, places: tuple[UpdatePlace, ...]
) -> TierBytes:
    found = _corrected(activations(shape, setup.workload), corrected)
    moved = moved_inputs(shape, setup.workload)
    host_activations = moved.host_bytes * setup.cluster.devices_per_node
    if setup.habits.checkpoints is Home.HOST:
        host_activations = found.kept * setup.cluster.devices_per_node
        found = replace(found, kept=0)
    if in_engine(setup):
        device, host, nvme, peak = _engine(shape, setup, found=found, places=places)
    else:
        device, host, nvme = _formulas(shape, setup)
        gradients = device.pop("lp_grads", 0)
        sums = setup.workload.accumulation > 1 and setup.optimizer is Home.DEVICE
        at_peak, at_its_time = peak_bytes(found, gradients=gradients, held=gradients if sums else 0)
        peak = DevicePeak(activations=at_peak, gradients=at_its_time)
    host["activations"] = host_activations
    device |= {
        "activations": peak.activations,
        "lp_grads": peak.gradients,
        "visits": peak.visits,
    }
    return TierBytes(device=_present(device), host=_present(host), nvme=_present(nvme))


def _corrected(found: Activations, factor: float) -> Activations:
    if factor == 1.0:
        return found
    sizes = {name: int(factor * getattr(found, name)) for name in ("kept", "block", "loss")}
    return replace(found, **sizes)


def _present(sizes: dict[str, int]) -> dict[str, int]:
    return {role: value for role, value in sizes.items() if value}


@functools.lru_cache(maxsize=64)
def _placed(
    shape: ModelShape, setup: Setup, places: tuple[UpdatePlace, ...]
) -> tuple[tuple[tuple[str, str, int], ...], PeakWalk]:
    """What the engine reserves by tier and role, and the walk through a step of that placement."""
    placement = placement_of(shape, setup, places=places or None)
    sizes = tuple((tier, role, size) for (tier, role), size in forecast(placement).items())
    return sizes, PeakWalk(placement)


def _engine(
    shape: ModelShape, setup: Setup, *, found: Activations, places: tuple[UpdatePlace, ...]
) -> tuple[dict[str, int], dict[str, int], dict[str, int], DevicePeak]:
    # How an update's work is cut changes nothing but whether there are several backwards.
    cut = replace(
        setup.workload,
        micro_batch=1,
        sequence=1,
        accumulation=min(2, setup.workload.accumulation),
    )
    placed, walk = _placed(shape, replace(setup, workload=cut), places)
    device = {role: size for tier, role, size in placed if tier == "device"}
    # Ranks are alike: a node's host holds what each of its ranks places there.
    local = setup.cluster.devices_per_node
    host = {role: size * local for tier, role, size in placed if tier == "host"}
    nvme = {role: size * local for tier, role, size in placed if tier == "nvme"}
    peak = walk.peak(found, placed=sum(device.values()))
    return device, host, nvme, peak


def _whole_gradients(shape: ModelShape, setup: Setup) -> int:
    wide = setup.workload.accumulation > 1 and setup.habits == FOREBAY
    item = 4 if wide else setup.workload.precision.item_bytes
    return item * shape.parameters // setup.workload.tensor_parallel


def _formulas(
    shape: ModelShape, setup: Setup
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """See [Note: ZeRO's formulas]."""
    work, ranks = setup.workload, setup.ranks
    count = shape.parameters // work.tensor_parallel
    item = work.precision.item_bytes
    largest = max(shape.unit_elements()) // work.tensor_parallel
    if setup.habits.tiles:
        largest = shape.largest_matrix // work.tensor_parallel // setup.habits.tiles
    share = ranks if setup.stage >= 1 else 1
    device: dict[str, int] = {}
    at_once = _UNITS_AT_ONCE * item * largest
    passing = 0
    if setup.weights is not Home.DEVICE:
        passing += min(at_once, item * count)
    elif setup.stage == 3 and ranks > 1:
        device["lp_params"] = item * count // ranks
        passing += at_once
    else:
        device["lp_params"] = item * count
    master = 0 if work.state.sixteen_bit_master else work.precision.master_bytes
    if setup.optimizer is Home.DEVICE:
        device["optim_states"] = work.state.moments * count // share
        device["hp_params"] = master * count // share
        whole = _whole_gradients(shape, setup)
        device["lp_grads"] = whole // (ranks if setup.stage >= 2 else 1)
        if setup.stage >= 2 and ranks > 1:
            passing += at_once
    else:
        # Gradients leave as backward makes them; a few wait for the link.
        own = item * count // ranks
        waiting = max(2 * item * largest // ranks, min(own // _BACKLOG_SHARE, _BACKLOG_BYTES))
        passing += at_once if ranks > 1 else 0
        device["lp_grads"] = min(waiting, item * count)
    device["staging"] = passing + setup.habits.buckets + int(setup.habits.device_extra * count)
    host, nvme = _host_and_drives(shape, setup)
    return device, host, nvme


def _host_and_drives(shape: ModelShape, setup: Setup) -> tuple[dict[str, int], dict[str, int]]:
    """What each node holds: all parameters over the nodes that share them."""
    work, habits = setup.workload, setup.habits
    share = setup.cluster.nodes if setup.stage >= 1 else 1
    count = shape.parameters // share
    host: dict[str, int] = {}
    nvme: dict[str, int] = {}
    if setup.optimizer is not Home.DEVICE:
        tier = host if setup.optimizer is Home.HOST else nvme
        if habits.host_bytes is not None:
            tier["optim_states"] = int(habits.host_bytes * count)
            if setup.optimizer is Home.NVME:
                host["staging"] = _NVME_BUFFER_BYTES * setup.cluster.devices_per_node
            return host, nvme
        sixteen = work.state.sixteen_bit_master
        tier["hp_params"] = (2 if sixteen else 4) * count
        tier["optim_states"] = work.state.moments * count
        one = work.accumulation == 1
        role = "lp_grads" if one else "contiguous_grad_buffer"
        host[role] = (work.precision.item_bytes if one else 4) * count
        if setup.optimizer is Home.NVME:
            host["staging"] = _NVME_BUFFER_BYTES * setup.cluster.devices_per_node
    # Split masters hold the bf16 weight as their high half, and fp32 weights are masters.
    in_master = work.precision.value != "fp16" and setup.weights is setup.optimizer
    if setup.weights is not Home.DEVICE and not in_master:
        tier = host if setup.weights is Home.HOST else nvme
        tier["lp_params"] = work.precision.item_bytes * count
    return host, nvme
