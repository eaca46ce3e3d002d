"""The most that a device holds at once beside what is placed there: a walk through one step.

[Note: the peak's moments] Three moments compete.
    loss       All blocks keep what backward needs, and the loss is computed. Of gradients there
               are sums of earlier backwards and, where there were some, those that wait for the
               link: Python is ahead of the device, so as many as may wait do.
    a block    Computed (again) and gone through backwards, beside gradients that wait, gradients
               that stay, and state that has come up for its update on the device.
    the end    Where a matrix is both embedding and output layer, its two gradients and their sum.
Measured on an H200 (3.2 billion parameters, 4,096 tokens): 14.206 GB at the end of backward, where
this walk says 14.206.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forebay.model.layout import SUM_ITEM_BYTES
from forebay.plan.memory import backlog_bytes, leaving_bytes
from forebay.plan.placement import Accumulation, UpdatePlace
from forebay.plan.unit_bytes import state_bytes, sum_bytes, whole_bytes

if TYPE_CHECKING:
    from forebay.plan.activations import Activations
    from forebay.plan.placement import Placement, UnitPlacement

__all__ = ["SHARE_OF_PEAK", "DevicePeak", "device_peak"]

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


def device_peak(placement: Placement, found: Activations, *, placed: int) -> DevicePeak:
    """The highest of the moments; see [Note: the peak's moments].

    Args:
        placement: Its units are what is before the blocks, the blocks, and perhaps a head.
        found: Activations of its model.
        placed: Bytes that forebay places on the device for good: state comes up as far as the peak
            of what is there without it.
    """
    without = max(_walk(placement, found, room=None), key=lambda moment: moment.total)
    if all(unit.update is not UpdatePlace.STREAMED for unit in placement.units):
        return without
    room = int(SHARE_OF_PEAK * (placed + without.total)) - placed
    moments = _walk(placement, found, room=room)
    highest = max(moments, key=lambda moment: moment.total)
    return replace(highest, visitors=moments[-1].visitors)


def _walk(placement: Placement, found: Activations, *, room: int | None) -> list[DevicePeak]:
    """All moments; `room` for what passes, visits included, or None where nothing visits."""
    held, visits = _Gradients(placement), _Visits(placement, room=room)
    loss = found.kept_by(found.blocks) + max(found.loss, found.block)
    moments = [DevicePeak(activations=loss, gradients=held.total)]
    held.begin_last()
    is_spread = placement.sharding.size > 1
    for place in range(len(placement.units) - 1, -1, -1):
        unit, kept = placement.units[place], found.kept_by(place)
        at_work = found.block if 0 < place <= found.blocks else 0
        # over ranks a gradient is whole until it is packed for its exchange
        local = whole_bytes(unit) if is_spread else 0
        moments.append(_moment(kept + at_work, held, visits, local=local))
        held.complete(unit, stays=visits.has(unit))
        if place == 0:
            moments.append(_moment(found.tied, held, visits))
        visits.come(beside=kept + held.total)
    moments[-1] = replace(moments[-1], visitors=visits.units)
    return moments


def _moment(activations: int, held: _Gradients, visits: _Visits, *, local: int = 0) -> DevicePeak:
    return DevicePeak(activations=activations, gradients=held.total + local, visits=visits.nbytes)


class _Gradients:
    """Gradients on the device: sums, those that stay, and those that wait for the link."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._most = backlog_bytes(placement)
        self._waiting: list[int] = []
        self._kept = 0
        self._sums = {u.layout.index: _sum_bytes(u, placement) for u in placement.units}
        if placement.backwards_per_update > 1 and placement.accumulation is Accumulation.HOST_SUM:
            # those of the backward before
            for unit in reversed(placement.units):
                if unit.update is not UpdatePlace.DEVICE:
                    self._wait(unit)

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self._kept + sum(self._waiting) + sum(self._sums.values())

    def begin_last(self) -> None:
        """The last backward begins: the link has been idle since the one before ended."""
        self._waiting.clear()

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

    def __init__(self, placement: Placement, *, room: int | None) -> None:
        self._placement = placement
        self._room = room
        streamed = [unit for unit in placement.units if unit.update is UpdatePlace.STREAMED]
        self._to_come = streamed if room is not None else []
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
            assert self._room is not None
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
