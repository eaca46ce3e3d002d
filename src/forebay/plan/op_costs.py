"""What each operation of a program costs on its lane, at given bandwidths, and where lanes meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.model.layout import ITEM_BYTES, SUM_ITEM_BYTES
from forebay.plan.fluid import Meeting, Task
from forebay.plan.ops import Lane, OpKind
from forebay.plan.placement import MasterLayout
from forebay.plan.policy_bytes import speculates
from forebay.plan.zenflow import ZenFlow

if TYPE_CHECKING:
    from forebay.plan.ops import Op
    from forebay.plan.placement import Placement, UnitPlacement
    from forebay.plan.solve import Rates

__all__ = ["OpCosts", "meetings"]

# A waited-for weight passes bulk traffic, as in the lanes.
_BULK = 1 << 30
# Device memory traffic of an update per parameter: read and write fp32 state, gradient, weight.
_DEVICE_UPDATE_BYTES = 28
_URGENT = (OpKind.PUBLISH, OpKind.LOAD, OpKind.READ_WEIGHTS, OpKind.ACTIVATION)
_ON_DEVICE = (OpKind.UPDATE, OpKind.IMPORTANT)
# An addend that is added to fp32 sums: these are read and written beside it.
_FOLD_BYTES = 2 * SUM_ITEM_BYTES
# Master and two moments of a parameter.
_STATE_BYTES = 12


class OpCosts:
    """Turns operations into tasks.

    Args:
        placement: Whose operations.
        rates: Bandwidths.
    """

    def __init__(self, placement: Placement, *, rates: Rates) -> None:
        self._placement = placement
        every = (*placement.units, *placement.frozen)
        self._units = {unit.layout.index: unit for unit in every}
        self._rates = rates
        self._links = {
            Lane.UP: rates.link_up,
            Lane.DOWN: rates.link_down,
            Lane.READ: rates.file_read,
            Lane.WRITE: rates.file_write,
        }

    def task(self, op: Op, after: tuple[int, ...]) -> Task:
        """An operation as a task on its lane."""
        rates, link = self._rates, self._links.get(op.lane)
        if link is not None:
            urgent = op.kind in _URGENT
            return Task(
                lane=op.lane,
                work=op.nbytes,
                rate=link,
                memory=self._memory_per_byte(op),
                after=after,
                priority=op.index if urgent else _BULK,
            )
        if op.unit is None or (op.lane is Lane.RANKS and not op.nbytes):
            return Task(lane=None, after=after)
        if op.lane is Lane.RANKS:
            seconds = op.nbytes / rates.ranks + rates.collective_seconds
            return Task(lane=Lane.RANKS, work=seconds, after=after)
        unit = self._units[op.unit]
        if op.lane is Lane.HOST:
            traffic = _host_bytes(unit, op.kind, placement=self._placement)
            rate = rates.update or rates.host_memory
            return Task(lane=Lane.HOST, work=traffic, rate=rate, memory=1.0, after=after)
        if op.kind in _ON_DEVICE:
            own = sum(self._placement.sharding.state(p).elements for p in unit.layout.parts)
            policy, share = self._placement.policy, 1.0
            if op.kind is OpKind.IMPORTANT and isinstance(policy, ZenFlow):
                share = policy.topk_ratio
            seconds = share * _DEVICE_UPDATE_BYTES * own / rates.device_memory
            # state that is elsewhere comes and goes in the same stream
            seconds += op.nbytes / min(rates.link_up, rates.link_down)
            return Task(lane=Lane.COMPUTE, work=seconds, after=after)
        return Task(lane=None, after=after)

    def _memory_per_byte(self, op: Op) -> float:
        """A copy writes or reads host memory once; a sum also reads it and updates fp32."""
        if op.kind is not OpKind.LAND_FOLD or op.unit is None:
            return 1.0
        parts = self._units[op.unit].layout.parts
        return 2.0 + _FOLD_BYTES / ITEM_BYTES[parts[0].dtype] if parts else 1.0


def _host_bytes(unit: UnitPlacement, kind: OpKind, *, placement: Placement) -> float:
    """Host memory traffic of this rank's update, sum of squares or gathering."""
    total = 0.0
    speculative = speculates(placement.policy, update=unit.update, weights=unit.weights)
    for part in unit.layout.parts:
        item = ITEM_BYTES[part.dtype]
        gradient = item if placement.sends_addends else SUM_ITEM_BYTES
        # master and two moments in and out; a whole master leaves a new weight beside it
        whole = placement.master_layout(part.dtype, update=unit.update) is MasterLayout.WHOLE
        update = 2 * _STATE_BYTES + gradient + (item if whole else 0)
        if speculative:
            # a processor reads a line of the second state before it writes it, all new as it is
            update += _STATE_BYTES
        per_element = {OpKind.NORM: 4, OpKind.GATHER_REST: gradient + _FOLD_BYTES}
        own = min(part.parameter_elements, placement.sharding.state(part).elements)
        total += per_element.get(kind, update) * own
    return total


def meetings(rates: Rates) -> tuple[Meeting, ...]:
    """Both directions of the link meet at its root, and there again with the update's traffic.

    Reads and writes of files meet in the drive.
    """
    link = frozenset({Lane.UP, Lane.DOWN})
    found = []
    if rates.both is not None:
        found.append(Meeting(lanes=link, total=rates.both))
    if rates.both_beside_update is not None:
        found.append(Meeting(lanes=link, total=rates.both_beside_update, beside=Lane.HOST))
    if rates.file_both is not None:
        found.append(Meeting(lanes=frozenset({Lane.READ, Lane.WRITE}), total=rates.file_both))
    return tuple(found)
