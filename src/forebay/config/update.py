"""From `forebay.update` and `super_offload` to an `UpdateSpec`, and what contradicts a mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from forebay.config.problems import Problem, shown
from forebay.config.resolved import Source
from forebay.config.update_spec import UpdateSpec

if TYPE_CHECKING:
    from forebay.config.lookup import Lookup
    from forebay.config.schema import Values

__all__ = ["resolve_update", "update_problems"]

_ZERO: Final = "zero_optimization"
_OFFLOAD: Final = f"{_ZERO}.offload_optimizer"
_SUPER: Final = f"{_OFFLOAD}.super_offload"
_RATIO: Final = f"{_OFFLOAD}.ratio"
_UPDATE: Final = "forebay.update"
_WARM_UP: Final = "forebay.warm_up_steps"


def update_problems(values: Values) -> list[Problem]:
    """What contradicts `super_offload`, `speculative` or `delayed`."""
    given = values.given
    update, supers = given.get(_UPDATE), bool(given.get(_SUPER))
    stage, device = given.get(f"{_ZERO}.stage", 0), _device(values)
    problems = []
    if supers and not (stage == 3 and device == "cpu"):
        problems.append(
            Problem(
                f"config key {_SUPER} needs stage 3 and device cpu; here the stage is {stage} and "
                f"the device {device}",
                'write "stage": 3 and "offload_optimizer": {"device": "cpu", ...}, or delete it',
            )
        )
    if supers and update not in (None, "speculative"):
        problems.append(
            Problem(
                f"config key {_UPDATE} = {shown(update)} contradicts {_SUPER}, which asks for "
                '"speculative"',
                "delete one of the two",
            )
        )
    if update in ("speculative", "delayed") and not supers:
        problems += _places(values, str(update))
    if update == "delayed":
        problems += _delayed(values)
    return problems


def _device(values: Values) -> str:
    old = "cpu" if values.given.get(f"{_ZERO}.cpu_offload") else "none"
    return values.given.get(f"{_OFFLOAD}.device") or old


def _places(values: Values, update: str) -> list[Problem]:
    device = _device(values)
    if device == "cpu" or (device == "nvme" and update == "delayed"):
        return []
    why = "with all state on the device there is no update on the host to hide"
    if device == "nvme":
        why = "what is discarded would have been written to the drive in vain"
    fits = "cpu or nvme" if update == "delayed" else "cpu"
    return [
        Problem(
            f"config key {_UPDATE} = {shown(update)} needs {_OFFLOAD}.device {fits}, and it is "
            f"{shown(device)}: {why}",
            'write "offload_optimizer": {"device": "cpu"}, or "update": "exact"',
        )
    ]


def _delayed(values: Values) -> list[Problem]:
    given, problems = values.given, []
    where = given.get(f"{_ZERO}.offload_param.device") or "none"
    where = "cpu" if given.get(f"{_ZERO}.cpu_offload_param") else where
    contradictions = (
        (
            given.get(_RATIO) == 0,
            f"{_RATIO} = 0",
            "with all state on the device there is no update on the host to hide",
        ),
        (
            where != "none",
            f"{_ZERO}.offload_param.device = {shown(where)}",
            "weights that are loaded for every pass would have to be kept twice on the host",
        ),
        (
            bool(given.get("forebay.streamed_units")),
            f"forebay.streamed_units = {shown(given.get('forebay.streamed_units'))}",
            "a visit to the device makes the host's update shorter, and that has a whole step",
        ),
        (
            bool(given.get("forebay.synchronous")),
            "forebay.synchronous = true",
            "that finishes every update within its step",
        ),
    )
    for is_given, key, why in contradictions:
        if is_given:
            problems.append(
                Problem(
                    f'config key {key} contradicts {_UPDATE} = "delayed": {why}',
                    'delete one of the two, or write "update": "exact"',
                )
            )
    return problems


def resolve_update(lookup: Lookup, *, is_zenflow: bool) -> UpdateSpec:
    """The mode; keys of modes that are not chosen are said to change nothing."""
    if is_zenflow:
        lookup.moot([_WARM_UP], note="changes nothing: it acts with update delayed only")
        return UpdateSpec(kind="zenflow")
    kind, source = lookup.answer(_UPDATE)
    if lookup.take(_SUPER) and kind != "speculative":
        kind = "speculative"
        lookup.record(_UPDATE, kind, Source.DERIVED, note=f"from {_SUPER}")
    else:
        lookup.record(_UPDATE, kind, source)
    if kind != "delayed":
        lookup.moot([_WARM_UP], note="changes nothing: it acts with update delayed only")
        return UpdateSpec(kind=kind)
    return UpdateSpec(kind=kind, warm_up_steps=lookup.take(_WARM_UP))
