"""Which units update where, chosen from bandwidths and bytes.

A unit that updates on the device costs the link its state both ways and host memory twice that;
a unit that updates on the host costs one fused pass over its state, and its weights going up.
Both share the host's memory bandwidth, so the split is an optimisation. The units that the next
forward needs first go to the device: they are ready at once, while the host works on the rest.

[Note: window time] With y elements streamed and z updated on the host, the time from the clip
factor to the last weight is max((26 z + 10 y) / D, 10 y / B_down, 2 z / B_up) for bf16 weights
(`limits`: D is what update and copies reach of the host's memory bandwidth together).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.model.layout import ITEM_BYTES
from forebay.plan.placement import UpdatePlace

if TYPE_CHECKING:
    from forebay.model.spec import ModelSpec, ParamSpec

__all__ = ["Rates", "choose_places", "window_seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bandwidths that the choice depends on, bytes per second.

    The defaults are those of a PCIe 5 x16 device on a host with eight memory channels; a ratio
    of two matters more than any of them.

    Attributes:
        host_memory: What update and copies reach together.
        link_up: To the device, alone.
        link_down: To the host, alone.
        update: What the update reaches alone; None where that is `host_memory`.
    """

    host_memory: float = 100e9
    link_up: float = 50e9
    link_down: float = 50e9
    update: float | None = None


def _update_bytes(param: ParamSpec) -> int:
    """Host memory traffic of one fused pass, per element: reads and writes."""
    item = ITEM_BYTES[param.dtype]
    # gradient in; master and two moments in and out (split masters: 10 + the weight's own 2)
    return {"bfloat16": 26, "float16": 2 * item + 24, "float32": item + 24}[param.dtype]


def _state_bytes(param: ParamSpec) -> int:
    """State of a streamed element, one way."""
    return {"bfloat16": 10, "float16": 12, "float32": 8}[param.dtype]


def window_seconds(spec: ModelSpec, places: tuple[UpdatePlace, ...], *, rates: Rates) -> float:
    """Time from the clip factor to the last new weight; see [Note: window time]."""
    host = streamed = published = 0
    for unit, place in zip(spec.units, places, strict=True):
        for param in unit.params:
            if place is UpdatePlace.HOST:
                host += _update_bytes(param) * param.elements
                published += ITEM_BYTES[param.dtype] * param.elements
            elif place is UpdatePlace.STREAMED:
                streamed += _state_bytes(param) * param.elements
    return max(
        (host + streamed) / rates.host_memory,
        streamed / rates.link_down,
        published / rates.link_up,
    )


def choose_places(
    spec: ModelSpec, *, rates: Rates | None = None, resident_bytes: int = 0
) -> tuple[UpdatePlace, ...]:
    """The update place of every unit, in module order.

    Args:
        spec: The model.
        rates: The machine's bandwidths.
        resident_bytes: Device bytes that optimizer state may fill for good.

    Returns:
        First units resident as far as the bytes go, the next ones streamed, the rest on the
        host; the number of streamed units is the one with the shortest window.
    """
    chosen_rates = rates or Rates()
    resident, used = 0, 0
    for unit in spec.units:
        used += sum(_state_bytes(param) * param.elements for param in unit.params)
        if used > resident_bytes:
            break
        resident += 1
    count = len(spec.units)

    def split(streamed: int) -> tuple[UpdatePlace, ...]:
        return (
            (UpdatePlace.DEVICE,) * resident
            + (UpdatePlace.STREAMED,) * streamed
            + (UpdatePlace.HOST,) * (count - resident - streamed)
        )

    return min(
        (split(streamed) for streamed in range(count - resident + 1)),
        key=lambda places: window_seconds(spec, places, rates=chosen_rates),
    )
