"""From the section `zenflow` and `forebay.update` to a `ZenflowSpec`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from forebay.config.problems import Problem, shown
from forebay.config.resolved import Source
from forebay.config.zenflow_spec import ZenflowSpec, refuse_late_rest
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.config.lookup import Lookup
    from forebay.config.resolved import BatchSpec
    from forebay.config.schema import Values

__all__ = ["resolve_zenflow", "zenflow_problems"]

_ZERO: Final = "zero_optimization"
_SECTION: Final = f"{_ZERO}.zenflow"
_DEVICE: Final = f"{_ZERO}.offload_optimizer.device"
_RATIO: Final = f"{_ZERO}.offload_optimizer.ratio"
_UPDATE: Final = "forebay.update"
_NAMES: Final = (
    "topk_ratio",
    "select_strategy",
    "select_interval",
    "update_interval",
    "overlap_step",
    "offload",
    "auto_ratio",
    "full_warm_up_rounds",
    "steps_per_epoch",
)
# Where "auto" has no epoch to go by.
_SELECT_STEPS: Final = 100


def zenflow_problems(values: Values) -> list[Problem]:
    """What contradicts the section, or the stage and device that it is given with."""
    given = values.given
    update = given.get(_UPDATE)
    if _SECTION not in values.sections and update != "zenflow":
        return []
    named = _SECTION if _SECTION in values.sections else f'{_UPDATE} = "zenflow"'
    problems = []
    if update not in (None, "zenflow"):
        problems.append(
            Problem(
                f"config key {_UPDATE} = {shown(update)} contradicts {_SECTION}, which asks for "
                '"zenflow"',
                f"delete one of the two: {_SECTION} is a mode of its own",
            )
        )
    if given.get(f"{_ZERO}.offload_optimizer.super_offload"):
        problems.append(
            Problem(
                f"config keys {_ZERO}.offload_optimizer.super_offload and {named} are two modes",
                f"delete one of the two; {_SECTION}.overlap_step updates the host's part beside "
                "training",
            )
        )
    stage = given.get(f"{_ZERO}.stage", 0)
    if stage not in (1, 2, 3):
        problems.append(
            Problem(
                f"config key {named} needs {_ZERO}.stage 1, 2 or 3, and the stage is {stage}",
                f'write "stage": 2, or delete {named.partition(" ")[0]}',
            )
        )
    return problems + _places(values, named) + _intervals(values)


def _places(values: Values, named: str) -> list[Problem]:
    given, problems, key = values.given, [], named.partition(" ")[0]
    old = "cpu" if given.get(f"{_ZERO}.cpu_offload") else "none"
    device = given.get(_DEVICE) or old
    if device != "cpu":
        why = (
            "columns that become important need their state at once, and in files it lies all over"
            if device == "nvme"
            else "it is a way of updating state that lives in host memory"
        )
        problems.append(
            Problem(
                f"config key {named} needs {_DEVICE} cpu, and it is {shown(device)}: {why}",
                f'write "offload_optimizer": {{"device": "cpu"}}, or delete {key}',
            )
        )
    elif given.get(_RATIO) == 0:
        problems.append(
            Problem(
                f"config key {named} needs state in host memory, and {_RATIO} = 0 keeps all of it "
                "on the device",
                f"raise {_RATIO}, or delete {key}",
            )
        )
    weights = given.get(f"{_ZERO}.offload_param.device") or "none"
    if given.get(f"{_ZERO}.cpu_offload_param"):
        weights = "cpu"
    if weights != "none":
        problems.append(
            Problem(
                f"config key {named} needs {_ZERO}.offload_param.device none, and it is "
                f"{shown(weights)}: important columns change in the weights on the device in "
                "every step",
                f"delete {_ZERO}.offload_param, or {key}",
            )
        )
    return problems


def _intervals(values: Values) -> list[Problem]:
    given = values.given
    strategy = given.get(f"{_SECTION}.select_strategy", "auto")
    interval = given.get(f"{_SECTION}.select_interval", "auto")
    key = f"{_SECTION}.select_interval"
    if strategy == "auto" and interval != "auto":
        return [
            Problem(
                f'config key {key} = {interval} counts nothing with select_strategy "auto"',
                'write "select_strategy": "step" or "epoch", or "select_interval": "auto"',
            )
        ]
    if strategy == "step" and interval == "auto":
        return [
            Problem(
                f'config key {key} is "auto" with select_strategy "step"',
                "write a number of updates, an integer >= 1",
            )
        ]
    return []


def resolve_zenflow(lookup: Lookup, *, batch: BatchSpec) -> ZenflowSpec | None:
    """What the configuration says of the mode; None where it asks for another one.

    Args:
        lookup: The configuration.
        batch: Samples of an update.

    Raises:
        ConfigError: Columns are to be chosen by epochs whose steps nobody knows, or more often
            than the rest is updated.
    """
    update, source = lookup.answer(_UPDATE)
    if _SECTION not in lookup.values.sections and update != "zenflow":
        return None
    if update != "zenflow":
        lookup.record(_UPDATE, "zenflow", Source.DERIVED, note=f"from {_SECTION}")
    else:
        lookup.record(_UPDATE, update, source)
    ratio, strategy, every, rest, overlap, offload, auto_ratio, rounds, epoch = (
        lookup.take(f"{_SECTION}.{name}") for name in _NAMES
    )
    update_steps = _update_steps(lookup, rest)
    if epoch is None and lookup.facts.samples is not None:
        epoch = _epoch_steps(lookup, lookup.facts.samples, batch=batch)
        lookup.record(f"{_SECTION}.steps_per_epoch", epoch, Source.DERIVED)
    select_steps = _select_steps(lookup, strategy, every, epoch)
    refuse_late_rest(
        update_steps=update_steps,
        select_steps=select_steps,
        what=f"config key {_SECTION}.update_interval",
    )
    return ZenflowSpec(
        topk_ratio=float(ratio),
        select_steps=select_steps,
        update_steps=update_steps,
        auto_ratio=float(auto_ratio),
        warm_up_steps=rounds,
        overlaps=overlap,
        keeps_state_on_host=offload,
    )


def _epoch_steps(lookup: Lookup, samples: int, *, batch: BatchSpec) -> int:
    """Updates that an epoch begins, with the batches that its loader makes."""
    drops, _ = lookup.answer("dataloader_drop_last")
    if not drops or lookup.facts.epochs_run_on:
        return -(-samples // batch.train_batch_size)
    batches = samples // batch.world_size // batch.micro_batch_size
    return max(1, -(-batches // batch.accumulation_steps))


def _update_steps(lookup: Lookup, given: int | str) -> int | None:
    path = f"{_SECTION}.update_interval"
    if given != "auto":
        lookup.annotate(path, "updates; gradient_accumulation_steps stays as it is")
        return int(given)
    lookup.annotate(path, "when the rest has gathered what important columns get in an update")
    return None


def _select_steps(lookup: Lookup, strategy: str, given: int | str, epoch: int | None) -> int:
    path = f"{_SECTION}.select_interval"
    if strategy == "step":
        return int(given)
    if epoch is None and strategy == "epoch":
        raise ConfigError(
            f'config key {_SECTION}.select_strategy = "epoch", and {lookup.facts.asker} does not '
            "know how many updates an epoch has",
            hint=f'write {_SECTION}.steps_per_epoch, pass training_data, or write "step"',
        )
    if epoch is None:
        lookup.annotate(path, f"{_SELECT_STEPS} updates, since nobody knows the epoch's")
        return _SELECT_STEPS
    epochs = 1 if given == "auto" else int(given)
    lookup.annotate(path, f"{epochs * epoch} updates: an epoch has {epoch}")
    return epochs * epoch
