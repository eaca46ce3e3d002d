"""From a DeepSpeed configuration and what the caller knows to a `ResolvedConfig`.

>>> resolve({"train_batch_size": 8, "bf16": {"enabled": True}}).precision.dtype
'bfloat16'
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, Literal

from forebay.config.batch import resolve_batch
from forebay.config.exchange import resolve_exchange
from forebay.config.facts import Facts
from forebay.config.leaf import resolve_leaf
from forebay.config.lookup import Lookup
from forebay.config.nvme import resolve_nvme
from forebay.config.optimizer import resolve_optimizer, resolve_scheduler
from forebay.config.parameters import resolve_parameters
from forebay.config.places import resolve_places
from forebay.config.precision import check_accumulation_dtype, resolve_precision
from forebay.config.reader import read
from forebay.config.resolved import (
    BudgetSpec,
    CheckpointSpec,
    ResolvedConfig,
    Source,
    TensorBoardSpec,
    ZeroSpec,
)
from forebay.config.schema import check
from forebay.config.support import refuse
from forebay.config.tables import TABLE
from forebay.config.update import resolve_update
from forebay.config.zenflow import resolve_zenflow

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

__all__ = ["resolve"]

_ZERO: Final = "zero_optimization"
_OFFLOAD: Final = "zero_optimization.offload_optimizer"
_TIERS: Final[Mapping[str, Literal["device", "host", "nvme"]]] = {
    "none": "device",
    "cpu": "host",
    "nvme": "nvme",
}


def resolve(
    raw: Mapping[str, Any] | str | os.PathLike[str], *, facts: Facts | None = None
) -> ResolvedConfig:
    """Reads, checks and resolves a configuration.

    Args:
        raw: A mapping, the path of a JSON file, or base64 of JSON. It is not changed.
        facts: What the caller knows; it answers "auto" and fills what is left out.

    Returns:
        Every value decided, with a row for each key that acts or was given.

    Raises:
        ConfigError: Anything unknown, mistyped, contradictory, unresolved or unsupported; in this
            order, all of one sort at once.
    """
    facts = facts or Facts()
    values = check(read(raw))
    refuse(values)
    lookup = Lookup(values, facts)
    precision = resolve_precision(lookup)
    batch = resolve_batch(lookup)
    check_accumulation_dtype(
        lookup, dtype=precision.dtype, accumulation_steps=batch.accumulation_steps
    )
    optimizer = resolve_optimizer(lookup)
    scheduler = resolve_scheduler(lookup)
    clip = float(lookup.take("gradient_clipping"))
    if not clip:
        lookup.annotate("gradient_clipping", "clipping is off")
    zero = _zero(lookup)
    budgets = BudgetSpec(
        device_bytes=lookup.take("forebay.device_budget"),
        host_bytes=lookup.take("forebay.host_budget"),
        nvme_bytes=lookup.take("forebay.nvme_budget") if zero.nvme is not None else None,
    )
    zenflow = resolve_zenflow(lookup, batch=batch)
    # One value passes so far; the row says which.
    lookup.take("forebay.state_format")
    config = ResolvedConfig(
        batch=batch,
        precision=precision,
        clip_norm=clip or None,
        optimizer=optimizer,
        scheduler=scheduler,
        zero=dataclasses.replace(zero, zenflow=zenflow),
        update=resolve_update(lookup, is_zenflow=zenflow is not None),
        exchange=resolve_exchange(lookup),
        keeps_activations_on_host=lookup.take("activation_checkpointing.cpu_checkpointing"),
        budgets=budgets,
        synchronous=lookup.take("forebay.synchronous"),
        rank_timeout=lookup.take("forebay.rank_timeout"),
        profile=lookup.take("forebay.profile"),
        steps_per_print=lookup.take("steps_per_print"),
        wall_clock_breakdown=lookup.take("wall_clock_breakdown"),
        dataloader_drop_last=lookup.take("dataloader_drop_last"),
        tensorboard=_tensorboard(lookup),
        checkpoint=CheckpointSpec(
            beside_training=lookup.take("checkpoint.writer.decoupled"),
            staging_bytes=lookup.take("forebay.checkpoint_staging"),
            keep=lookup.take("forebay.keep_checkpoints"),
            shows_statistics=lookup.take("checkpoint.writer.show_statistics"),
        ),
    )
    return dataclasses.replace(config, rows=lookup.rows())


def _zero(lookup: Lookup) -> ZeroSpec:
    stage = lookup.take(f"{_ZERO}.stage")
    if stage == 3 and lookup.facts.world_size == 1:
        lookup.annotate(
            f"{_ZERO}.stage", "one process: stage 3 places and sums the same as stage 2"
        )
    old = lookup.values.given.get(f"{_ZERO}.cpu_offload")
    if old is None:
        device = lookup.take(f"{_OFFLOAD}.device") or "none"
        pin_memory = lookup.take(f"{_OFFLOAD}.pin_memory")
        lookup.moot(
            [f"{_ZERO}.cpu_offload_use_pin_memory"],
            note="changes nothing: it acts with cpu_offload only",
        )
    else:
        device = "cpu" if lookup.take(f"{_ZERO}.cpu_offload") else "none"
        pin_memory = lookup.take(f"{_ZERO}.cpu_offload_use_pin_memory")
        note = "from the old form, cpu_offload"
        lookup.record(f"{_OFFLOAD}.device", device, Source.DERIVED, note=note)
        lookup.record(f"{_OFFLOAD}.pin_memory", pin_memory, Source.DERIVED, note=note)
    parameters = resolve_parameters(lookup, state=device, pin_memory=pin_memory)
    places = resolve_places(lookup, device=device)
    cores = lookup.take(f"{_OFFLOAD}.cpuadam_cores_perc")
    return ZeroSpec(
        stage=stage,
        optimizer_tier=_TIERS[device],
        parameter_tier=parameters.tier,
        loads=parameters.loads,
        pin_memory=pin_memory,
        ratio=places.ratio,
        streamed_units=places.streamed_units,
        update_cores=None if cores is None else float(cores),
        unit_elements=_unit_elements(lookup),
        leaf=resolve_leaf(lookup),
        nvme=resolve_nvme(lookup, device=device, with_weights=parameters.tier == "nvme"),
    )


def _unit_elements(lookup: Lookup) -> int | None:
    path = f"{_ZERO}.sub_group_size"
    elements, source = lookup.answer(path)
    if elements == TABLE[path].default:
        lookup.record(path, "the model's blocks", source, note="the default sets no size of units")
        return None
    note = "each parameter is a unit" if elements <= 1 else "largest unit"
    lookup.record(path, elements, source, note=note)
    # DeepSpeed closes a group once it is larger than the limit, so that 0 means one parameter.
    return max(1, int(elements))


def _tensorboard(lookup: Lookup) -> TensorBoardSpec | None:
    names = ("output_path", "job_name")
    if not lookup.take("tensorboard.enabled"):
        lookup.moot(
            [f"tensorboard.{name}" for name in names],
            note="changes nothing: it acts with tensorboard.enabled only",
        )
        return None
    output_path, job_name = (lookup.take(f"tensorboard.{name}") for name in names)
    return TensorBoardSpec(output_path=output_path, job_name=job_name)
