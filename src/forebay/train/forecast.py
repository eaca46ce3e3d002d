"""The planner's record of a run: what it predicts and what the run took, beside each other."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forebay.accelerators.select import device_name
from forebay.compat.checkpoints import least_bytes
from forebay.errors import ConfigError
from forebay.hardware.profile import Machine, load_profile
from forebay.plan.model_config import shape_of
from forebay.plan.placement import AccumulationOrder, UpdatePlace
from forebay.plan.run_record import Measured, RunRecord
from forebay.plan.setup import Cluster, Home, Setup
from forebay.plan.workload import Inputs, Precision, Recompute, Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from forebay.config.resolved import ResolvedConfig
    from forebay.hardware.rates import DriveUse
    from forebay.plan.placement import Placement

__all__ = ["Took", "run_record"]

# The first updates warm up: compilation, caches, page faults.
_WARM_UP = 2
_PRECISIONS = {
    "float32": Precision.FP32,
    "bfloat16": Precision.BF16,
    "float16": Precision.FP16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """What a run took.

    Attributes:
        seconds: Of its last updates, in order.
        tiers: Bytes placed by tier and role.
        peak: Torch's peak on the device; None on the CPU.
        placement: Where the engine had each unit.
        drives: What it did with its files; None without any.
    """

    seconds: Sequence[float]
    tiers: dict[str, dict[str, int]]
    peak: int | None
    placement: Placement
    drives: DriveUse | None = None


def run_record(
    model: dict[str, Any],
    *,
    config: ResolvedConfig,
    device: torch.device,
    sequence: int,
    recompute: Recompute,
    took: Took,
) -> RunRecord | None:
    """The record; None where the model's family is not known or the run was too short.

    Args:
        model: The model's configuration.
        config: The run's.
        device: Where it computed.
        sequence: Tokens of a row.
        recompute: Whether blocks were computed again.
        took: What it took.
    """
    steady = took.seconds[_WARM_UP:]
    try:
        shape = shape_of(model, source="the model")
    except ConfigError:
        return None
    if not steady:
        return None
    ranks = config.batch.world_size
    local = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    budget = config.budgets.host_bytes
    files = config.zero.nvme.weights if config.zero.nvme else None
    setup = Setup(
        cluster=Cluster(devices_per_node=local, nodes=ranks // local),
        stage=config.zero.stage,
        optimizer=Home(config.zero.optimizer_tier),
        weights=Home(config.zero.parameter_tier),
        workload=Workload(
            micro_batch=config.batch.micro_batch_size,
            accumulation=config.batch.accumulation_steps,
            sequence=sequence,
            precision=_PRECISIONS[config.precision.dtype],
            recompute=recompute,
            inputs=Inputs.HOST if config.keeps_activations_on_host else Inputs.DEVICE,
            order=AccumulationOrder(config.batch.order),
        ),
        host_budget=None if budget is None else budget - local * least_bytes(config),
        weights_in_memory=files.in_memory_elements if files else 0,
    )
    machine = device_name(device)
    record = RunRecord(
        machine=Machine.read(machine),
        shape=shape,
        setup=setup,
        streamed_units=_updated(took.placement, UpdatePlace.STREAMED),
        resident_units=_updated(took.placement, UpdatePlace.DEVICE),
        measured=Measured(
            seconds=statistics.median(steady),
            steps=len(steady),
            host_bytes=local * sum(took.tiers.get("host", {}).values()),
            device_bytes=sum(took.tiers.get("device", {}).values()),
            device_peak_bytes=took.peak,
            drives=took.drives,
        ),
    )
    if config.profile is None:
        return record
    profile = load_profile(config.profile, device=machine)
    return replace(record, predicted_seconds=record.predict(profile))


def _updated(placement: Placement, place: UpdatePlace) -> tuple[int, ...]:
    """Numbers of the units that were updated in a place."""
    return tuple(unit.layout.index for unit in placement.units if unit.update is place)
