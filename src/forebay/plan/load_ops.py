"""Operations that bring weights off the device up for the passes of a window."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from forebay.plan.foresight import Pass
from forebay.plan.loads import window_loads
from forebay.plan.ops import Lane, Op, OpKind, Trigger, TriggerKind, Turn
from forebay.plan.placement import WeightPlace
from forebay.plan.unit_bytes import load_bytes, weight_file_bytes, whole_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.plan.loads import Uses
    from forebay.plan.placement import Placement, UnitPlacement

__all__ = ["load_ops"]

_TRIGGERS = {Pass.FORWARD: TriggerKind.FORWARD_USE, Pass.BACKWARD: TriggerKind.BACKWARD_USE}


def load_ops(placement: Placement, *, uses: Uses) -> list[Op]:
    """What brings weights for each pass: once for units that every pass of a kind loads.

    Loads of weights in files follow their reads, and gathers over ranks follow both, by positions
    in the list.

    Args:
        placement: Where everything lives.
        uses: What passes use.
    """
    every = (*placement.units, *placement.frozen)
    by_index = {unit.layout.index: unit for unit in every}
    loads = window_loads(placement, uses=uses)
    ops: list[Op] = []
    for (kind, index), count in Counter((load.kind, load.unit) for load in loads).items():
        is_every = count == placement.backwards_per_update
        turn = Turn.EVERY if is_every else Turn.LAST
        for _ in range(1 if is_every else count):
            for follows, (what, lane, nbytes) in enumerate(_steps(by_index[index], placement)):
                op = Op(
                    kind=what,
                    lane=lane,
                    unit=index,
                    nbytes=nbytes,
                    after=(len(ops) - 1,) if follows else (),
                    trigger=Trigger(_TRIGGERS[kind], index),
                    turn=turn,
                )
                ops.append(op)
    return ops


def _steps(unit: UnitPlacement, placement: Placement) -> Iterator[tuple[OpKind, Lane, int]]:
    """What one load does, one after the other: kind, lane and bytes."""
    if unit.weights is WeightPlace.NVME:
        yield OpKind.READ_WEIGHTS, Lane.READ, weight_file_bytes(unit, placement)
    if unit.weights.is_off_device:
        yield OpKind.LOAD, Lane.UP, load_bytes(unit, placement)
    if placement.gathers_weights:
        yield OpKind.GATHER_WEIGHTS, Lane.RANKS, whole_bytes(unit)
