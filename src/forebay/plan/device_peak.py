"""The most that a device holds at once beside what is placed there: a walk through one step.

[Note: the peak's moments] Three moments compete.
    loss       All blocks keep what backward needs, and the loss is computed. Of gradients there
               are sums of earlier backwards; those that went to the host have left before the
               model's last unit.
    a block    Computed (again) and gone through backwards, beside gradients that wait, gradients
               that stay, and state that has come up for its update on the device.
    the end    Where a matrix is both embedding and output layer, its two gradients and their sum.
Measured on an H200 (3.2 billion parameters, 4,096 tokens): 13.603 GB at the loss, where this walk
says 13.601.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forebay.model.layout import SUM_ITEM_BYTES
from forebay.plan.memory import backlog_bytes, leaving_bytes
from forebay.plan.placement import Accumulation, UpdatePlace
from forebay.plan.unit_bytes import state_bytes, sum_bytes, whole_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.plan.activations import Activations
    from forebay.plan.placement import Placement, UnitPlacement

__all__ = ["SHARE_OF_PEAK", "DevicePeak", "PeakWalk"]

# How far state that visits may fill what activations leave under the peak: between two looks a
# block's recomputed activations come and go.
SHARE_OF_PEAK = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """Bytes at the highest moment.

    Attributes:
        activations: What torch computes with.
        gradients: All that are on the device.
        visits: State that came up for its update.
        visitors: Units whose state it is, by index.
    """

    activations: int
    gradients: int = 0
    visits: int = 0
    visitors: frozenset[int] = frozenset()

    @property
    def total(self) -> int:
        """All of it."""
        return self.activations + self.gradients + self.visits


class PeakWalk:
    """The walk through a step of one placement; see [Note: the peak's moments].

    Args:
        placement: Its units are what is before the blocks, the blocks, and perhaps a head.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._visits = any(unit.update is UpdatePlace.STREAMED for unit in placement.units)
        self._gradients = _gradients_alone(placement)

    def peak(self, found: Activations, *, placed: int) -> DevicePeak:
        """The highest of the moments.

        Args:
            found: Activations of its model.
            placed: Bytes that forebay places on the device for good: state comes up as far as the
                peak of what is there without it.
        """
        pairs = zip(_activations(found, len(self._placement.units)), self._gradients, strict=True)
        without = max(pairs, key=sum)
        if not self._visits:
            return DevicePeak(activations=without[0], gradients=without[1])
        room = int(SHARE_OF_PEAK * (placed + sum(without))) - placed
        moments, visitors = _with_visits(self._placement, found, room=room)
        return replace(max(moments, key=lambda moment: moment.total), visitors=visitors)


def _activations(found: Activations, units: int) -> Iterator[int]:
    """Of each moment: the loss, each unit from the last one, and the end."""
    yield found.kept_by(found.blocks) + max(found.loss, found.block)
    for place in range(units - 1, -1, -1):
        yield found.kept_by(place) + (found.block if 0 < place <= found.blocks else 0)
    yield found.tied


def _gradients_alone(placement: Placement) -> list[int]:
    """Bytes of gradients at each moment where no state visits: no activation changes them."""
    held = _Gradients(placement)
    moments = [held.total]
    for unit in reversed(placement.units):
        moments.append(held.total + _unpacked(unit, placement))
        held.complete(unit, stays=False)
    return [*moments, held.total]


def _unpacked(unit: UnitPlacement, placement: Placement) -> int:
    """Over ranks a gradient is whole until it is packed for its exchange."""
    return whole_bytes(unit) if placement.sharding.size > 1 else 0


def _with_visits(
    placement: Placement, found: Activations, *, room: int
) -> tuple[list[DevicePeak], frozenset[int]]:
    """All moments, and which units have come; `room` is for all that passes, visits included."""
    held, visits = _Gradients(placement), _Visits(placement, room=room)
    computed = _activations(found, len(placement.units))
    moments = [DevicePeak(activations=next(computed), gradients=held.total)]
    for place in range(len(placement.units) - 1, -1, -1):
        unit, gradients = placement.units[place], held.total
        moments.append(
            DevicePeak(
                activations=next(computed),
                gradients=gradients + _unpacked(unit, placement),
                visits=visits.nbytes,
            )
        )
        held.complete(unit, stays=visits.has(unit))
        if place:
            visits.come(beside=found.kept_by(place) + held.total)
    moments.append(
        DevicePeak(activations=next(computed), gradients=held.total, visits=visits.nbytes)
    )
    visits.come(beside=held.total)
    return moments, visits.units


class _Gradients:
    """Gradients on the device: sums, those that stay, and those that wait for the link."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._most = backlog_bytes(placement)
        self._waiting: list[int] = []
        self._kept = 0
        self._sums = {u.layout.index: _sum_bytes(u, placement) for u in placement.units}

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self._kept + sum(self._waiting) + sum(self._sums.values())

    def complete(self, unit: UnitPlacement, *, stays: bool) -> None:
        """A unit's gradient of the last backward is there; it stays, or goes to the host."""
        self._sums[unit.layout.index] = 0
        if stays:
            self._kept += whole_bytes(unit)
        elif unit.update is UpdatePlace.DEVICE:
            self._kept += _kept_bytes(unit, self._placement)
        else:
            self._wait(unit)

    def _wait(self, unit: UnitPlacement) -> None:
        self._waiting.append(leaving_bytes(unit, self._placement))
        while len(self._waiting) > 1 and sum(self._waiting) > self._most:
            self._waiting.pop(0)


class _Visits:
    """State that has come up, and its gradients to come: in the order of the next forward."""

    def __init__(self, placement: Placement, *, room: int) -> None:
        self._placement = placement
        self._room = room
        self._to_come = [u for u in placement.units if u.update is UpdatePlace.STREAMED]
        self._here: set[int] = set()
        self._promised = 0
        self._done: set[int] = set()
        self.nbytes = 0

    @property
    def units(self) -> frozenset[int]:
        """Those that have come, by index."""
        return frozenset(self._here)

    def has(self, unit: UnitPlacement) -> bool:
        """Whether a unit's gradient stays; it is complete now."""
        index = unit.layout.index
        self._done.add(index)
        if index not in self._here:
            return False
        self._promised -= whole_bytes(unit)
        return True

    def come(self, *, beside: int) -> None:
        """Bring up what fits beside `beside` bytes."""
        while self._to_come:
            unit = self._to_come[0]
            if unit.layout.index in self._done:  # its gradient has left
                self._to_come = self._to_come[1:]
                continue
            state = state_bytes(unit, self._placement) + sum_bytes(unit, self._placement)
            left = self._room - beside - self.nbytes - self._promised
            if left < state + whole_bytes(unit):
                return
            self.nbytes += state
            self._promised += whole_bytes(unit)
            self._here.add(unit.layout.index)
            self._to_come = self._to_come[1:]


def _kept_bytes(unit: UnitPlacement, placement: Placement) -> int:
    """Bytes of the gradient of a unit that is updated where it is, at the end of a window."""
    if placement.sharding.size > 1:
        return SUM_ITEM_BYTES * _elements(unit, placement, sliced=placement.sharding.stage > 0)
    if placement.backwards_per_update > 1:
        return SUM_ITEM_BYTES * _elements(unit, placement)
    return whole_bytes(unit)


def _sum_bytes(unit: UnitPlacement, placement: Placement) -> int:
    """Bytes of the sum of earlier backwards, where it is on the device."""
    on_device = placement.accumulation is Accumulation.DEVICE_SUM
    if placement.backwards_per_update == 1 or not (on_device or unit.update is UpdatePlace.DEVICE):
        return 0
    # stages 0 and 1 exchange once a window
    sharding = placement.sharding
    return SUM_ITEM_BYTES * _elements(
        unit, placement, sliced=sharding.size > 1 and sharding.stage > 1
    )


def _elements(unit: UnitPlacement, placement: Placement, *, sliced: bool = False) -> int:
    return sum(
        placement.sharding.own(part).elements if sliced else part.elements
        for part in unit.layout.parts
    )
