"""What the planner says of a step benchmark's contestant, to stand beside what was measured.

The placement is the engine's own; its program is simulated with the rates of the same run.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from forebay.bench.spec import SHAPES
from forebay.errors import ConfigError
from forebay.hardware.profile import Profile
from forebay.plan.activations import activations
from forebay.plan.compute import BlockMatrices, compute_seconds
from forebay.plan.device_peak import device_peak
from forebay.plan.memory import forecast
from forebay.plan.placement import UpdatePlace
from forebay.plan.program import build_program
from forebay.plan.simulate import ComputeSeconds, simulate
from forebay.plan.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from forebay.bench.spec import StepSpec
    from forebay.plan.placement import Placement

__all__ = ["forecast_of"]


def forecast_of(
    spec: StepSpec,
    placement: Placement,
    *,
    order: Sequence[int],
    micro_batch: int,
    frozen_bytes: int,
) -> dict[str, float]:
    """Bytes by tier and, where the machine's rates are known, seconds of a step.

    Args:
        spec: The work; blocks are recomputed.
        placement: Where everything lives.
        order: Its units as a forward needs them.
        micro_batch: Rows of one forward.
        frozen_bytes: Bytes of weights that stay on the device and are not trained.
    """
    shape = SHAPES[spec.size].planned(spec.size)
    work = Workload(
        micro_batch=micro_batch,
        accumulation=spec.accumulation,
        sequence=spec.sequence,
        order=placement.order,
    )
    placed = {"device": 0, "host": 0}
    for (tier, _), nbytes in forecast(placement).items():
        placed[tier] = placed.get(tier, 0) + nbytes
    held = placed["device"] + frozen_bytes
    peak = device_peak(placement, activations(shape, work), placed=held)
    return {
        "forecast_device_bytes": held + peak.total,
        "forecast_host_bytes": placed["host"],
    } | _seconds(spec, _with_visits(placement, peak.visitors), work, order=order)


def _with_visits(placement: Placement, visitors: Container[int]) -> Placement:
    """The placement of a step in which these units' state finds room on the device."""
    return replace(
        placement,
        units=tuple(
            unit
            if unit.update is not UpdatePlace.STREAMED or unit.layout.index in visitors
            else replace(unit, update=UpdatePlace.HOST)
            for unit in placement.units
        ),
    )


def _seconds(
    spec: StepSpec, placement: Placement, work: Workload, *, order: Sequence[int]
) -> dict[str, float]:
    if not spec.profile:
        return {}
    profile = Profile.from_dict(json.loads(spec.profile), source="this run's profile")
    shape = SHAPES[spec.size]
    matrices = BlockMatrices.FROZEN if shape.frozen else BlockMatrices.TRAINED
    try:
        compute = compute_seconds(
            shape.planned(spec.size), workload=work, profile=profile, matrices=matrices
        )
    except ConfigError:  # the processor has no rate for 16-bit products
        return {}
    compute = _with_frozen(compute, frozen=len(placement.frozen), blocks=shape.layers)
    if len(order) != len(compute.forward):
        return {}
    program = build_program(placement, order=order)
    ran = simulate(
        program, placement=placement, rates=profile.rates(), compute=compute, order=order
    )
    return {"forecast_seconds": ran.step_seconds}


def _with_frozen(compute: ComputeSeconds, *, frozen: int, blocks: int) -> ComputeSeconds:
    """With a unit of frozen matrices beside each block's: both are waited for, then it is computed.

    As it is where frozen weights are in no unit.
    """
    if frozen != blocks:
        return compute
    forward, backward = (
        (seconds[0], *[0.0] * blocks, *seconds[1 + blocks :], *seconds[1 : 1 + blocks])
        for seconds in (compute.forward, compute.backward)
    )
    return ComputeSeconds(forward=forward, backward=backward)
