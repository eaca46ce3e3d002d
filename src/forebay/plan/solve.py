"""Which units update where, chosen from bandwidths and bytes.

A unit that updates on the device costs the link its state both ways and host memory twice that;
a unit that updates on the host costs one fused pass over its state, and its weights going up.
Both share the host's memory bandwidth, so the split is an optimisation. The units that the next
forward needs first go to the device: they are ready at once, while the host works on the rest.

[Note: window time] With y elements streamed and z updated on the host, two things run at once
from the clip factor on: the update, which moves 26 z bytes of host memory for bf16 weights (28 z
where it reads fp32 sums), and 10 y bytes of state going home. Each has its own rate beside the
other, and a higher one once the other has finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.model.layout import ITEM_BYTES, SUM_ITEM_BYTES
from forebay.plan.placement import UpdatePlace

if TYPE_CHECKING:
    from forebay.model.spec import ModelSpec, ParamSpec

__all__ = ["Rates", "choose_places", "state_bytes", "window_seconds"]


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
        down_beside_update: To the host while the update runs and weights go up; None for
            `link_down`, or half of `host_memory` where that is less.
        update_beside_down: What the update reaches meanwhile; None for what downloads leave of
            `host_memory`.
        device_memory: What an update on the device reaches of its memory.
        file_read: From files, all paths together.
        file_write: To files.
        ranks: Bytes of a whole unit that a collective brings to every rank in a second.
        collective_seconds: What a collective costs beside that.
    """

    host_memory: float = 100e9
    link_up: float = 50e9
    link_down: float = 50e9
    update: float | None = None
    down_beside_update: float | None = None
    update_beside_down: float | None = None
    device_memory: float = 2e12
    file_read: float = 5e9
    file_write: float = 3e9
    ranks: float = 100e9
    collective_seconds: float = 20e-6

    def seconds(self, *, updated: float, home: float) -> float:
        """Time of `updated` bytes of host memory traffic beside `home` bytes of state."""
        down = self.down_beside_update or min(self.link_down, self.host_memory / 2)
        beside = self.update_beside_down or self.host_memory - down
        both = min(updated / beside, home / down)
        rest_updated, rest_home = updated - beside * both, home - down * both
        alone = max(rest_updated / (self.update or self.host_memory), rest_home / self.link_down)
        return both + alone


def _update_bytes(param: ParamSpec, *, gradient_bytes: int | None) -> int:
    """Host memory traffic of one fused pass, per element: reads and writes."""
    item = ITEM_BYTES[param.dtype]
    # master and two moments in and out (split masters: 10 + the weight's own 2); gradient in
    state = {"bfloat16": 24, "float16": item + 24, "float32": 24}[param.dtype]
    return state + (item if gradient_bytes is None else gradient_bytes)


def state_bytes(param: ParamSpec) -> int:
    """State of a streamed element, one way."""
    return {"bfloat16": 10, "float16": 12, "float32": 8}[param.dtype]


def window_seconds(
    spec: ModelSpec, places: tuple[UpdatePlace, ...], *, rates: Rates, backwards: int = 1
) -> float:
    """Time from the clip factor to the last new weight; see [Note: window time]."""
    host = streamed = published = 0
    gradient_bytes = SUM_ITEM_BYTES if backwards > 1 else None
    for unit, place in zip(spec.units, places, strict=True):
        for param in unit.params:
            if place is UpdatePlace.HOST:
                host += _update_bytes(param, gradient_bytes=gradient_bytes) * param.elements
                published += ITEM_BYTES[param.dtype] * param.elements
            elif place is UpdatePlace.STREAMED:
                streamed += state_bytes(param) * param.elements
    return max(rates.seconds(updated=host, home=streamed), published / rates.link_up)


def choose_places(
    spec: ModelSpec, *, rates: Rates | None = None, resident_bytes: int = 0, backwards: int = 1
) -> tuple[UpdatePlace, ...]:
    """The update place of every unit, in module order.

    Args:
        spec: The model.
        rates: The machine's bandwidths.
        resident_bytes: Device bytes that optimizer state, and the fp32 sums of resident units
            when there are several backwards, may fill for good.
        backwards: Backwards per update.

    Returns:
        First units resident as far as the bytes go, the next ones streamed, the rest on the
        host; the number of streamed units is the one with the shortest window.
    """
    chosen_rates = rates or Rates()
    resident, used = 0, 0
    for unit in spec.units:
        sums = SUM_ITEM_BYTES if backwards > 1 else 0
        used += sum((state_bytes(param) + sums) * param.elements for param in unit.params)
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
        key=lambda places: window_seconds(spec, places, rates=chosen_rates, backwards=backwards),
    )
