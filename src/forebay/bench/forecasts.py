"""What the planner says of a step benchmark's contestant, to stand beside what was measured.

The placement is the engine's own; its program is simulated with the rates of the same run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forebay.bench.spec import SHAPES
from forebay.bench.variant import Variant
from forebay.errors import ConfigError
from forebay.hardware.profile import Profile
from forebay.plan.activations import activations, moved_inputs
from forebay.plan.compute import BlockMatrices, compute_seconds
from forebay.plan.device_peak import PeakWalk
from forebay.plan.memory import forecast
from forebay.plan.placement import UpdatePlace
from forebay.plan.program import Lane, build_program
from forebay.plan.simulate import ComputeSeconds, simulate
from forebay.plan.workload import Inputs, Workload

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from forebay.bench.spec import StepSpec
    from forebay.plan.loads import Uses
    from forebay.plan.placement import Placement

__all__ = ["Passes", "forecast_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """What a placement's passes are like.

    Attributes:
        order: Its units as a forward needs them.
        uses: Of weights that come and go, what the last passes used; None where none did.
    """

    order: Sequence[int]
    uses: Uses | None = None


def forecast_of(
    spec: StepSpec,
    placement: Placement,
    *,
    passes: Passes,
    micro_batch: int,
    frozen_bytes: int,
) -> dict[str, float]:
    """Bytes by tier and by link and, where the machine's rates are known, seconds of a step.

    Args:
        spec: The work; blocks are recomputed.
        placement: Where everything lives.
        passes: What they use of it.
        micro_batch: Rows of one forward.
        frozen_bytes: Bytes of weights that stay on the device and are not trained.
    """
    shape = SHAPES[spec.size].planned(spec.size)
    work = Workload(
        micro_batch=micro_batch,
        accumulation=spec.accumulation,
        sequence=spec.sequence,
        inputs=Inputs.HOST if Variant.parse(spec.variant).offloads else Inputs.DEVICE,
        order=placement.order,
    )
    placed = {"device": 0, "host": 0}
    for (tier, _), nbytes in forecast(placement).items():
        placed[tier] = placed.get(tier, 0) + nbytes
    held, found = placed["device"] + frozen_bytes, activations(shape, work)
    moved = moved_inputs(shape, work)
    peak = PeakWalk(placement).peak(found, placed=held)
    visited = _with_visits(placement, peak.visitors)
    program = build_program(visited, order=passes.order, uses=passes.uses)
    said: dict[str, float] = {
        "forecast_device_bytes": held + peak.total,
        "forecast_host_bytes": placed["host"] + moved.host_bytes,
        "forecast_up_bytes": program.traffic(Lane.UP),
        "forecast_down_bytes": program.traffic(Lane.DOWN),
        "forecast_activations_bytes": work.backwards * moved.total,
    }
    seconds = _seconds(spec, visited, work, passes=passes)
    return said if seconds is None else said | {"forecast_seconds": seconds}


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
    spec: StepSpec,
    placement: Placement,
    work: Workload,
    *,
    passes: Passes,
) -> float | None:
    if not spec.profile:
        return None
    profile = Profile.from_dict(json.loads(spec.profile), source="this run's profile")
    shape = SHAPES[spec.size]
    matrices = BlockMatrices.FROZEN if shape.frozen else BlockMatrices.TRAINED
    try:
        compute = compute_seconds(
            shape.planned(spec.size), workload=work, profile=profile, matrices=matrices
        )
    except ConfigError:  # the processor has no rate for 16-bit products
        return None
    moved = moved_inputs(shape.planned(spec.size), work).by_unit(len(compute.forward))
    compute = replace(compute, inputs=moved)
    compute = _with_frozen(compute, frozen=len(placement.frozen), blocks=shape.layers)
    if len(passes.order) != len(compute.forward):
        return None
    ran = simulate(
        build_program(placement, order=passes.order, uses=passes.uses),
        placement=placement,
        rates=profile.rates(),
        compute=compute,
        order=passes.order,
    )
    return ran.step_seconds


def _with_frozen(compute: ComputeSeconds, *, frozen: int, blocks: int) -> ComputeSeconds:
    """With a unit of frozen matrices beside each block's: both are waited for, then it is computed.

    As it is where frozen weights are in no unit.
    """
    if frozen != blocks:
        return compute

    def moved(values: Sequence[float]) -> tuple[float, ...]:
        last = 1 + blocks
        return (values[0], *[0] * blocks, *values[last:], *values[1:last])

    return ComputeSeconds(
        forward=moved(compute.forward),
        backward=moved(compute.backward),
        inputs=tuple(map(int, moved(compute.inputs))),
    )
