"""When updates run, as `forebay.offload` is asked for it in plain values.

Names, meanings and defaults are those of the configuration, of which the engine loads nothing that
reads files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from forebay.config.update_spec import WARM_UP_STEPS
from forebay.config.zenflow_spec import refuse_late_rest
from forebay.errors import ConfigError
from forebay.plan.policies import EXACT, Delayed, Policy, Speculative
from forebay.plan.zenflow import ZenFlow

__all__ = ["Update", "asked_policy"]

Update = str | Mapping[str, Mapping[str, Any]]

_MODES: Final = ("exact", "speculative", "delayed", "zenflow")
# What "auto" is where nobody knows of epochs: let gradients decide, and every so many updates.
_AUTO: Final[Mapping[str, int | None]] = {"update_every": None, "select_every": 100}


def asked_policy(update: Update) -> Policy:
    """The policy of that name, with these settings.

    Args:
        update: A value of the configuration's key `forebay.update`, or that value and its settings
            under the configuration's names: `warm_up_steps` of "delayed", and of "zenflow" the keys
            of its section but for those about epochs.

    Raises:
        ConfigError: There is none of that name, or a setting cannot be honoured.

    Example:
        >>> asked_policy({"delayed": {"warm_up_steps": 10}})
        Delayed(warm_up_steps=10)
    """
    given: Any = {update: {}} if isinstance(update, str) else update
    is_one = isinstance(given, Mapping) and len(given) == 1 and next(iter(given)) in _MODES
    if not is_one or not all(isinstance(settings, Mapping) for settings in given.values()):
        raise ConfigError(
            f"update is {update!r}; it must be one of {', '.join(_MODES)}",
            hint='update="delayed", or with settings update={"delayed": {"warm_up_steps": 10}}',
        )
    [(name, settings)] = given.items()
    if name == "delayed":
        return Delayed(**{"warm_up_steps": WARM_UP_STEPS, **_read(name, settings, _DELAYED)})
    if name == "zenflow":
        return _zenflow(**{**_AUTO, **_read(name, settings, _ZENFLOW)})
    _read(name, settings, {})
    return Speculative() if name == "speculative" else EXACT


def _zenflow(**values: Any) -> ZenFlow:
    settings = ZenFlow(**values)
    refuse_late_rest(
        update_steps=settings.update_every,
        select_steps=settings.select_every,
        what="update 'zenflow': update_interval",
    )
    return settings


def _read(name: str, settings: Mapping[str, Any], known: Mapping[str, _Setting]) -> dict[str, Any]:
    """The values of settings, under the names of the policy."""
    found = {}
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(
                f"update {name!r} has no setting {key!r}",
                hint=f"one of {', '.join(known)}" if known else f'update="{name}"',
            )
        field, fits, form = known[key]
        if not fits(value):
            raise ConfigError(f"update {name!r}: {key} is {value!r}; it must be {form}")
        found[field] = value
    return {f: _AUTO[f] if v == "auto" and f in _AUTO else v for f, v in found.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_steps(value: Any) -> bool:
    return value == "auto" or (_is_count(value) and value >= 1)


def _is_part(value: Any) -> bool:
    return _is_number(value) and 0 < value < 1


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


# The policy's name, whether a value fits, and what fits in words.
_Setting = tuple[str, Callable[[Any], bool], str]
_COUNT: Final = (_is_count, "an integer >= 0")
_STEPS: Final = (_is_steps, 'an integer >= 1 or "auto"')
_FLAG: Final = (_is_flag, "true or false")
_DELAYED: Final[Mapping[str, _Setting]] = {"warm_up_steps": ("warm_up_steps", *_COUNT)}
_ZENFLOW: Final[Mapping[str, _Setting]] = {
    "topk_ratio": ("topk_ratio", _is_part, "a number above 0 and below 1"),
    "select_interval": ("select_every", *_STEPS),
    "update_interval": ("update_every", *_STEPS),
    "auto_ratio": ("auto_ratio", _is_share, "a number from 0 to 1"),
    "full_warm_up_rounds": ("warm_up_steps", *_COUNT),
    "overlap_step": ("overlaps", *_FLAG),
    "offload": ("keeps_state_on_host", *_FLAG),
}
