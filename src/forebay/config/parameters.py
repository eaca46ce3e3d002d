"""Resolution of `offload_param`: where the working weights live, and how many are up at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from forebay.config.resolved import Source
from forebay.config.tables import TABLE
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.config.lookup import Lookup

__all__ = ["Parameters", "resolve_parameters"]

_ZERO: Final = "zero_optimization"
_PARAM: Final = f"{_ZERO}.offload_param"
_LIVE: Final = f"{_ZERO}.stage3_max_live_parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Where working weights live; see `ZeroSpec`."""

    tier: Literal["device", "host"]
    live_elements: int | None


def resolve_parameters(lookup: Lookup, *, state_on_host: bool, pin_memory: bool) -> Parameters:
    """Answers the keys of `offload_param`.

    Args:
        lookup: The configuration.
        state_on_host: Whether optimizer state lives on the host.
        pin_memory: Whether that is page-locked.

    Raises:
        ConfigError: Weights are to live on the host and state on the device, or only one of the
            two is to be page-locked.
    """
    old = lookup.values.given.get(f"{_ZERO}.cpu_offload_param")
    if old is None:
        device = lookup.take(f"{_PARAM}.device") or "none"
    else:
        device = "cpu" if lookup.take(f"{_ZERO}.cpu_offload_param") else "none"
        note = "from the old form, cpu_offload_param"
        lookup.record(f"{_PARAM}.device", device, Source.DERIVED, note=note)
    if device == "none":
        note = "changes nothing: no parameter is offloaded"
        lookup.moot([f"{_PARAM}.pin_memory", _LIVE], note=note)
        return Parameters(tier="device", live_elements=None)
    if not state_on_host:
        raise ConfigError(
            f"config key {_PARAM}.device = cpu needs optimizer state on the host too: it takes six "
            "times the bytes of the weights",
            hint='write "offload_optimizer": {"device": "cpu"} beside it',
        )
    if lookup.is_written(f"{_PARAM}.pin_memory"):
        pinned = lookup.take(f"{_PARAM}.pin_memory")
        if pinned != pin_memory:
            raise ConfigError(
                f"config key {_PARAM}.pin_memory is {pinned}, and "
                f"{_ZERO}.offload_optimizer.pin_memory is {pin_memory}",
                hint="write the same for both: one policy locks all that is copied",
            )
    else:
        lookup.record(f"{_PARAM}.pin_memory", pin_memory, Source.DERIVED)
    elements, source = lookup.answer(_LIVE)
    live = None if elements == TABLE[_LIVE].default and source is not Source.GIVEN else elements
    lookup.record(_LIVE, elements, source)
    if live is None:
        lookup.annotate(_LIVE, "where forebay.device_budget does not say otherwise")
    return Parameters(tier="host", live_elements=live)
