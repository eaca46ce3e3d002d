"""Update places that a configuration gives: a host's share in bytes, or units; and in words.

The units that the next forward needs first keep their state on the device, so that they are ready
at once while the host works on the rest.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from forebay.errors import ConfigError
from forebay.plan.placement import UpdatePlace
from forebay.plan.solve import state_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.model.spec import ModelSpec
    from forebay.plan.placement import Placement

__all__ = ["describe_places", "host_share", "places_for_share", "places_for_units"]

_WORDS = {
    UpdatePlace.HOST: "on the host",
    UpdatePlace.DEVICE: "on the device",
    UpdatePlace.STREAMED: "on the device, visiting",
    UpdatePlace.NVME: "on the host, from files",
}


def places_for_share(spec: ModelSpec, *, share: float) -> tuple[UpdatePlace, ...]:
    """Update places that leave a share of the state's bytes to the host, to the nearest unit.

    Args:
        spec: The model.
        share: From 0 (all on the device) to 1 (all on the host).
    """
    sizes = [sum(state_bytes(p) * p.elements for p in unit.params) for unit in spec.units]
    total = sum(sizes)

    def error(first: int) -> float:
        return abs(sum(sizes[first:]) - share * total)

    first = min(range(len(sizes) + 1), key=error)
    return (UpdatePlace.DEVICE,) * first + (UpdatePlace.HOST,) * (len(sizes) - first)


def places_for_units(spec: ModelSpec, *, streamed: Sequence[int]) -> tuple[UpdatePlace, ...]:
    """Update places where the configuration says which units' state visits the device.

    Args:
        spec: The model.
        streamed: Their numbers; the others update on the host.

    Raises:
        ConfigError: The model has no unit of that number.
    """
    count = len(spec.units)
    if streamed and max(streamed) >= count:
        raise ConfigError(
            f"config key forebay.streamed_units names unit {max(streamed)}; this model has "
            f"{count}, from 0",
            hint="plan this model again with: forebay plan MODEL --config FILE",
        )
    return tuple(
        UpdatePlace.STREAMED if index in streamed else UpdatePlace.HOST for index in range(count)
    )


def host_share(placement: Placement) -> float:
    """Share of the state's bytes whose units update on the host; 0 without state."""
    by_place: dict[UpdatePlace, int] = {}
    for unit in placement.units:
        size = sum(
            placement.streamed_item_bytes(part.dtype) * part.parameter_elements
            for part in unit.layout.parts
        )
        by_place[unit.update] = by_place.get(unit.update, 0) + size
    total = sum(by_place.values())
    return sum(size for place, size in by_place.items() if place.lands) / total if total else 0.0


def describe_places(placement: Placement) -> str:
    """Where each unit updates, runs of units in one place together."""
    runs = []
    for place, members in groupby(placement.units, key=lambda unit: unit.update):
        names = [unit.layout.name for unit in members]
        what = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        runs.append(f"{what} {_WORDS[place]}")
    return "; ".join(runs)
