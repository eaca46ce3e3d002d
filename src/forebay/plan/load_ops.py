"""Operations that bring weights on the host up for the passes of a window."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from forebay.plan.foresight import Pass
from forebay.plan.loads import window_loads
from forebay.plan.ops import Lane, Op, OpKind, Trigger, TriggerKind, Turn
from forebay.plan.unit_bytes import unit_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.plan.placement import Placement

__all__ = ["load_ops"]

_TRIGGERS = {Pass.FORWARD: TriggerKind.FORWARD_USE, Pass.BACKWARD: TriggerKind.BACKWARD_USE}


def load_ops(placement: Placement, *, order: Sequence[int]) -> list[Op]:
    """One operation for each unit that every pass of a kind loads; else one for each load.

    Args:
        placement: Where everything lives.
        order: Unit indices in the order in which a forward needs them.
    """
    by_index = {unit.layout.index: unit for unit in placement.units}
    loads = window_loads(placement, order=order)
    ops: list[Op] = []
    for (kind, index), count in Counter((load.kind, load.unit) for load in loads).items():
        is_every = count == placement.backwards_per_update
        op = Op(
            kind=OpKind.LOAD,
            lane=Lane.UP,
            unit=index,
            nbytes=unit_bytes(by_index[index], placement),
            trigger=Trigger(_TRIGGERS[kind], index),
            turn=Turn.EVERY if is_every else Turn.LAST,
        )
        ops += [op] * (1 if is_every else count)
    return ops
