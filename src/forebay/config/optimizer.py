"""The optimizer and the schedule that a configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, cast

from forebay.config.keys import Status
from forebay.config.names import OPTIMIZERS
from forebay.config.resolved import OptimizerSpec, SchedulerSpec, Source
from forebay.config.tables import TABLE
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.config.lookup import Lookup

__all__ = ["resolve_optimizer", "resolve_scheduler"]

_MODE: Final = "optimizer.params.adam_w_mode"
_DECAY: Final = "optimizer.params.weight_decay"
_REPLACED: Final = "changes nothing: the {what} that the program built takes its place"


def resolve_optimizer(lookup: Lookup) -> OptimizerSpec | None:
    """The optimizer to build; None where the caller brings one or nobody names one.

    A caller that knows a learning rate and brings no optimizer gets AdamW.

    Raises:
        ConfigError: An "auto" that nobody answers, or Adam with a weight decay of unknown kind.
    """
    if lookup.facts.client_optimizer is not None:
        note = _REPLACED.format(what=lookup.facts.client_optimizer)
        _skip(lookup, "optimizer", note=note)
        return None
    if "optimizer.type" not in lookup.values.given:
        if lookup.facts.learning_rate is None:
            return None
        lookup.record("optimizer.type", "AdamW", Source.DEFAULT)
        name: Literal["Adam", "AdamW"] = "AdamW"
    else:
        name = OPTIMIZERS[lookup.take("optimizer.type").lower()]
    lr, betas, eps, decay = (
        lookup.take(f"optimizer.params.{key}") for key in ("lr", "betas", "eps", "weight_decay")
    )
    mode = lookup.values.given.get(_MODE)
    if mode is not None:
        lookup.take(_MODE)
    if name == "AdamW" and mode is False:
        raise ConfigError(
            f"config key {_MODE} is false, and optimizer.type is AdamW",
            hint='write "type": "Adam" for L2 weight decay, or delete adam_w_mode',
        )
    if name == "Adam" and mode is None and decay > 0:
        raise ConfigError(
            f"optimizer.type Adam with {_DECAY} {decay:g} has two meanings: torch's Adam adds L2 "
            f"decay to the gradient, DeepSpeed's decays as AdamW does",
            hint='write "type": "AdamW" for decoupled decay, or "adam_w_mode": false for L2',
        )
    return OptimizerSpec(
        name="AdamW" if mode else name,
        lr=float(lr),
        betas=betas,
        eps=float(eps),
        weight_decay=float(decay),
        is_decay_mode_chosen=name == "AdamW" or mode is not None,
    )


def resolve_scheduler(lookup: Lookup) -> SchedulerSpec | None:
    """The schedule to build; None where the caller brings one or the configuration has none.

    Raises:
        ConfigError: An "auto" that nobody answers, a required argument that is missing, or a run
            shorter than its warm-up.
    """
    if lookup.facts.client_scheduler is not None:
        note = _REPLACED.format(what=lookup.facts.client_scheduler)
        _skip(lookup, "scheduler", note=note)
        return None
    if "scheduler.type" not in lookup.values.given:
        return None
    name = lookup.take("scheduler.type")
    params = {}
    for key in TABLE:
        if key.level == "scheduler.params" and name in key.only_for:
            params[key.name] = lookup.take(key.path)
    _annotate(lookup, params)
    for required in ("total_num_steps", "cycle_min_lr", "cycle_max_lr"):
        if required in params and params[required] is None:
            raise ConfigError(
                f"config key scheduler.params.{required} is missing: {name} needs it",
                hint=f'write it, or "auto" where {lookup.facts.asker} knows it'
                if required == "total_num_steps"
                else "write it",
            )
    total, warmup = params.get("total_num_steps"), params.get("warmup_num_steps")
    if total is not None and warmup is not None and warmup > total:
        raise ConfigError(
            f"config key scheduler.params.total_num_steps is {total}, and warmup_num_steps is "
            f"{warmup}: the warm-up would not end",
            hint=f"write a warmup_num_steps of at most {total}",
        )
    return SchedulerSpec(name=cast("Literal['WarmupLR']", name), params=tuple(params.items()))


def _annotate(lookup: Lookup, params: dict[str, object]) -> None:
    """Says which rate governs: the optimizer's or the schedule's."""
    own = "each parameter group's own lr"
    for name in ("warmup_max_lr", "lr_range_test_min_lr"):
        if name in params and params[name] is None:
            path = f"scheduler.params.{name}"
            lookup.record(path, own, lookup.answer(path)[1])
            return
    if "warmup_min_ratio" not in params and lookup.has_row("optimizer.params.lr"):
        lookup.annotate("optimizer.params.lr", "the schedule sets every rate instead")


def _skip(lookup: Lookup, section: str, *, note: str) -> None:
    for key in TABLE:
        # Facts that contradict a section which is not used are no error, so `answer` is not asked.
        if key.path.startswith(f"{section}.") and key.status is Status.HONOURED:
            if key.path in lookup.values.given:
                lookup.record(key.path, lookup.values.given[key.path], Source.GIVEN, note=note)
            elif key.path in lookup.values.autos:
                lookup.record(key.path, "auto", Source.AUTO, note=note)
