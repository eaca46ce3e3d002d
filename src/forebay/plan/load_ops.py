"""Operations that bring weights off the device up for the passes of a window."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from forebay.plan.foresight import Pass
from forebay.plan.loads import window_loads
from forebay.plan.ops import Lane, Op, OpKind, Trigger, TriggerKind, Turn
from forebay.plan.placement import WeightPlace
from forebay.plan.unit_bytes import load_bytes, weight_file_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.plan.placement import Placement

__all__ = ["load_ops"]

_TRIGGERS = {Pass.FORWARD: TriggerKind.FORWARD_USE, Pass.BACKWARD: TriggerKind.BACKWARD_USE}


def load_ops(placement: Placement, *, order: Sequence[int]) -> list[Op]:
    """One operation for each unit that every pass of a kind loads; else one for each load.

    Loads of weights in files follow their reads, by positions in the list.

    Args:
        placement: Where everything lives.
        order: Unit indices in the order in which a forward needs them.
    """
    by_index = {unit.layout.index: unit for unit in placement.units}
    loads = window_loads(placement, order=order)
    ops: list[Op] = []
    for (kind, index), count in Counter((load.kind, load.unit) for load in loads).items():
        is_every = count == placement.backwards_per_update
        turn = Turn.EVERY if is_every else Turn.LAST
        trigger = Trigger(_TRIGGERS[kind], index)
        unit = by_index[index]
        for _ in range(1 if is_every else count):
            after: tuple[int, ...] = ()
            if unit.weights is WeightPlace.NVME:
                after = (len(ops),)
                read = Op(
                    kind=OpKind.READ_WEIGHTS,
                    lane=Lane.READ,
                    unit=index,
                    nbytes=weight_file_bytes(unit, placement),
                    trigger=trigger,
                    turn=turn,
                )
                ops.append(read)
            load = Op(
                kind=OpKind.LOAD,
                lane=Lane.UP,
                unit=index,
                nbytes=load_bytes(unit, placement),
                after=after,
                trigger=trigger,
                turn=turn,
            )
            ops.append(load)
    return ops
