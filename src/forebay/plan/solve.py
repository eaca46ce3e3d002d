"""Which units update where, chosen from bandwidths and bytes.

A unit that updates on the device costs the link its state both ways and host memory twice that;
a unit that updates on the host costs one fused pass over its state, and its weights going up.
Both share the host's memory bandwidth, so the split is an optimisation. The units that the next
forward needs first go to the device: they are ready at once, while the host works on the rest.

[Note: window time] With y elements streamed and z updated on the host, three things run at once
from the clip factor on: the update, which moves 26 z bytes of host memory for bf16 weights (28 z
where it reads fp32 sums), 10 y bytes of state going home (12 y with weights on the host), and 2 z
bytes of new weights going up (2 (y + z) with weights on the host, which the forward loads). Each
has its own rate beside the others, and a higher one once another has finished. All of it must be
over before the forward's last unit: its activations want the memory of the state.

Where seconds of computation are known too, `plan.search` asks the simulator instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.model.layout import ITEM_BYTES, SUM_ITEM_BYTES
from forebay.plan.placement import UpdatePlace, WeightPlace

if TYPE_CHECKING:
    from forebay.model.spec import ModelSpec, ParamSpec, UnitSpec

__all__ = [
    "DeviceRoom",
    "Rates",
    "choose_places",
    "state_bytes",
    "visit_bytes",
    "window_seconds",
]


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
        both: Both directions of the link together; None for the sum of both.
        both_beside_update: The same while the update runs; None for `both`.
        down_beside_update: To the host while the update runs and nothing goes up; None for
            `link_down`, or half of `host_memory` where that is less.
        update_beside_down: What the update reaches meanwhile; None for what downloads leave of
            `host_memory`.
        device_memory: What an update on the device reaches of its memory.
        file_read: From files, all paths together.
        file_write: To files.
        file_both: Both at once, together; None for the sum of both.
        ranks: Bytes of a whole unit that a collective brings to every rank in a second.
        collective_seconds: What a collective costs beside that.
    """

    host_memory: float = 100e9
    link_up: float = 50e9
    link_down: float = 50e9
    update: float | None = None
    both: float | None = None
    both_beside_update: float | None = None
    down_beside_update: float | None = None
    update_beside_down: float | None = None
    device_memory: float = 2e12
    file_read: float = 5e9
    file_write: float = 3e9
    file_both: float | None = None
    ranks: float = 100e9
    collective_seconds: float = 20e-6

    def seconds(self, *, updated: float, home: float, up: float = 0.0) -> float:
        """Time of three things that begin together.

        Args:
            updated: Host memory traffic of the update.
            home: State going down.
            up: Weights going up.
        """
        left = {"update": updated, "down": home, "up": up}
        total = 0.0
        while active := {name for name, value in left.items() if value > 0}:
            rates = self._together(active)
            step = min(left[name] / rates[name] for name in active)
            total += step
            for name in active:
                rest = left[name] - rates[name] * step
                left[name] = rest if rest > 1e-9 * left[name] else 0.0
        return total

    def _together(self, active: set[str]) -> dict[str, float]:
        """What each of the active ones reaches beside the others."""
        update = self.update or self.host_memory
        both = min(self.both or self.link_up + self.link_down, self.host_memory)
        if "update" not in active:
            share = {"up": self.link_up, "down": self.link_down}
            return {n: min(rate, both / len(active)) for n, rate in share.items() if n in active}
        if active == {"update"}:
            return {"update": update}
        if "up" in active and "down" in active:
            links = min(self.both_beside_update or both, both, self.host_memory / 2)
            return {"up": links / 2, "down": links / 2, "update": self.host_memory - links}
        if "up" in active:
            up = min(self.link_up, self.host_memory / 2)
            return {"up": up, "update": min(update, self.host_memory - up)}
        down = self.down_beside_update or min(self.link_down, self.host_memory / 2)
        return {"down": down, "update": self.update_beside_down or self.host_memory - down}


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
    spec: ModelSpec,
    places: tuple[UpdatePlace, ...],
    *,
    rates: Rates,
    backwards: int = 1,
    weights: WeightPlace = WeightPlace.DEVICE,
) -> float:
    """Time from the clip factor to the last new weight; see [Note: window time]."""
    host = streamed = up = 0
    gradient_bytes = SUM_ITEM_BYTES if backwards > 1 else None
    for unit, place in zip(spec.units, places, strict=True):
        loads = weights is WeightPlace.HOST and place is not UpdatePlace.DEVICE
        for param in unit.params:
            item = ITEM_BYTES[param.dtype]
            if place is UpdatePlace.HOST:
                host += _update_bytes(param, gradient_bytes=gradient_bytes) * param.elements
            elif place is UpdatePlace.STREAMED:
                streamed += (state_bytes(param) + (item if loads else 0)) * param.elements
            if place is UpdatePlace.HOST or loads:
                up += item * param.elements
    return rates.seconds(updated=host, home=streamed, up=up)


def visit_bytes(unit: UnitSpec, *, backwards: int, weights: WeightPlace) -> int:
    """Device memory of a streamed unit until it is updated: state, sums, and its gradient."""
    sums = SUM_ITEM_BYTES if backwards > 1 else 0
    own = 1 if weights is WeightPlace.HOST else 0
    return sum(
        (state_bytes(param) + sums + (1 + own) * ITEM_BYTES[param.dtype]) * param.elements
        for param in unit.params
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRoom:
    """What places may take of the device.

    Attributes:
        resident_bytes: For optimizer state, and the fp32 sums of resident units when there are
            several backwards, for good.
        visit_bytes: For state that visits, all at once; None where nobody knows.
    """

    resident_bytes: int = 0
    visit_bytes: int | None = None


def choose_places(
    spec: ModelSpec,
    *,
    rates: Rates | None = None,
    room: DeviceRoom | None = None,
    backwards: int = 1,
    weights: WeightPlace = WeightPlace.DEVICE,
) -> tuple[UpdatePlace, ...]:
    """The update place of every unit, in module order.

    Args:
        spec: The model.
        rates: The machine's bandwidths.
        room: On the device; None for no resident state and any number of visitors.
        backwards: Backwards per update.
        weights: Where working weights live.

    Returns:
        First units resident as far as the bytes go, the next ones streamed, the rest on the
        host; the number of streamed units is the one with the shortest window.
    """
    chosen_rates, given = rates or Rates(), room or DeviceRoom()
    resident, used = 0, 0
    for unit in spec.units:
        sums = SUM_ITEM_BYTES if backwards > 1 else 0
        used += sum((state_bytes(param) + sums) * param.elements for param in unit.params)
        if used > given.resident_bytes:
            break
        resident += 1
    count = len(spec.units)
    most, used = 0, 0
    for unit in spec.units[resident:]:
        used += visit_bytes(unit, backwards=backwards, weights=weights)
        if given.visit_bytes is not None and used > given.visit_bytes:
            break
        most += 1

    def split(streamed: int) -> tuple[UpdatePlace, ...]:
        return (
            (UpdatePlace.DEVICE,) * resident
            + (UpdatePlace.STREAMED,) * streamed
            + (UpdatePlace.HOST,) * (count - resident - streamed)
        )

    return min(
        (split(streamed) for streamed in range(most + 1)),
        key=lambda places: window_seconds(
            spec, places, rates=chosen_rates, backwards=backwards, weights=weights
        ),
    )
