"""Resolution of where units update, where the configuration says it: a share, or the units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.config.lookup import Lookup

__all__ = ["Places", "resolve_places"]

_OFFLOAD: Final = "zero_optimization.offload_optimizer"
_RATIO: Final = f"{_OFFLOAD}.ratio"
_UNITS: Final = "forebay.streamed_units"


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What is said of the places; see `ZeroSpec`."""

    ratio: float | None = None
    streamed_units: tuple[int, ...] | None = None


def resolve_places(lookup: Lookup, *, device: str) -> Places:
    """Answers `ratio` and `forebay.streamed_units`.

    Args:
        lookup: The configuration.
        device: Where the optimizer state lives.

    Raises:
        ConfigError: Both are given, or state is to be shared out or to visit that lives on the
            device.
    """
    ratio, units = lookup.take(_RATIO), lookup.take(_UNITS)
    if device == "none" and ratio is not None:
        raise ConfigError(
            f"config key {_RATIO} = {ratio:g} needs state off the device, and {_OFFLOAD}.device is "
            "none",
            hint=f'write "offload_optimizer": {{"device": "cpu", "ratio": {ratio:g}}}, or delete '
            "the key",
        )
    if units is None:
        return Places(ratio=None if ratio is None else float(ratio))
    if device != "cpu":
        raise ConfigError(
            f"config key {_UNITS} needs optimizer state in host memory, and {_OFFLOAD}.device is "
            f"{device}",
            hint='write "offload_optimizer": {"device": "cpu"}, or leave the key out',
        )
    if ratio is not None:
        raise ConfigError(
            f"config keys {_UNITS} and {_RATIO} both say where units update",
            hint="leave one of them out",
        )
    return Places(streamed_units=tuple(units))
