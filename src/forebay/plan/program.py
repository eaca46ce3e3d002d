"""The operations of one window and one update, as a graph: what the engine will do.

An operation names its lane, its bytes on the link, its predecessors and the trigger that starts
it. A graph, not a list: an operation whose trigger never comes (a branch not taken) is not
done, and one whose trigger comes early or late waits for its predecessors alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from forebay.model.layout import ITEM_BYTES
from forebay.plan.placement import Accumulation, UpdatePlace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.plan.placement import Placement, UnitPlacement

__all__ = ["Lane", "Op", "OpKind", "Program", "Trigger", "TriggerKind", "Turn", "build_program"]


class Lane(Enum):
    """The queue that executes an operation."""

    COMPUTE = "compute"
    DOWN = "down"
    UP = "up"
    HOST = "host"


class OpKind(Enum):
    """What an operation does."""

    NORM = "norm"
    """Sum the squares of a unit's final gradient where it lives."""
    LAND = "land"
    """Bring a unit's gradient to the host."""
    LAND_FOLD = "land_fold"
    """Bring one backward's addends to the host and add them to the fp32 sums."""
    AGREE = "agree"
    """Norm, finiteness and presence, once for the whole model and all ranks."""
    UPDATE = "update"
    """Update a unit's masters, moments and weights."""
    PUBLISH = "publish"
    """Bring a unit's new weights to the device."""


class TriggerKind(Enum):
    """What starts an operation."""

    GRADIENT = "gradient"
    """A unit's gradient of the present backward is complete."""
    STEP = "step"
    """The optimizer's step."""


class Turn(Enum):
    """In which backward of a window a gradient operation runs."""

    EVERY = "every"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Trigger:
    """A kind and, for unit triggers, the unit's index."""

    kind: TriggerKind
    unit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation.

    Attributes:
        index: Its number in the program.
        kind: What it does.
        lane: Where it runs.
        unit: Its unit's index; None for the agreement.
        nbytes: Bytes that it moves over its link when all gradients are present.
        after: Indices of its predecessors.
        trigger: What starts it.
        turn: In which backward of the window.
    """

    index: int
    kind: OpKind
    lane: Lane
    unit: int | None
    nbytes: int
    after: tuple[int, ...]
    trigger: Trigger
    turn: Turn = Turn.LAST


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """All operations of one window of `backwards` backwards and its update."""

    ops: tuple[Op, ...]
    backwards: int
    _started_by: dict[Trigger, list[Op]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        started_by: dict[Trigger, list[Op]] = {}
        for op in self.ops:
            started_by.setdefault(op.trigger, []).append(op)
        object.__setattr__(self, "_started_by", started_by)

    def at(self, trigger: Trigger) -> Sequence[Op]:
        """The operations that a trigger starts, in order."""
        return self._started_by.get(trigger, ())

    def traffic(self, lane: Lane) -> int:
        """Bytes over a lane per update, when every gradient is present in every backward."""
        return sum(
            op.nbytes * (self.backwards if op.turn is Turn.EVERY else 1)
            for op in self.ops
            if op.lane is lane
        )


def _unit_bytes(unit: UnitPlacement, item_bytes: int | None = None) -> int:
    return sum(
        part.parameter_elements * (item_bytes or ITEM_BYTES[part.dtype])
        for part in unit.layout.parts
    )


class _Builder:
    def __init__(self) -> None:
        self.ops: list[Op] = []

    def add(
        self,
        kind: OpKind,
        lane: Lane,
        trigger: Trigger,
        *,
        nbytes: int = 0,
        after: tuple[int, ...] = (),
        unit: int | None = None,
        turn: Turn = Turn.LAST,
    ) -> int:
        index = len(self.ops)
        self.ops.append(
            Op(
                index=index,
                kind=kind,
                lane=lane,
                unit=unit,
                nbytes=nbytes,
                after=after,
                trigger=trigger,
                turn=turn,
            )
        )
        return index


def _gradient_ops(builder: _Builder, unit: UnitPlacement, placement: Placement) -> tuple[int, int]:
    """Add one unit's gradient operations; returns (what AGREE waits for, what UPDATE waits for)."""
    index = unit.layout.index
    grad, step = Trigger(TriggerKind.GRADIENT, index), Trigger(TriggerKind.STEP)
    if unit.update is UpdatePlace.DEVICE:
        norm = builder.add(OpKind.NORM, Lane.COMPUTE, grad, unit=index)
        return norm, norm
    if placement.accumulation is Accumulation.HOST_SUM:
        fold = builder.add(
            OpKind.LAND_FOLD,
            Lane.DOWN,
            grad,
            unit=index,
            nbytes=_unit_bytes(unit),
            turn=Turn.EVERY,
        )
        return builder.add(OpKind.NORM, Lane.HOST, step, unit=index, after=(fold,)), fold
    norm = builder.add(OpKind.NORM, Lane.COMPUTE, grad, unit=index)
    item = 4 if placement.accumulation is Accumulation.DEVICE_SUM else None
    land = builder.add(
        OpKind.LAND, Lane.DOWN, grad, unit=index, nbytes=_unit_bytes(unit, item), after=(norm,)
    )
    return norm, land


def build_program(placement: Placement, *, order: Sequence[int]) -> Program:
    """The program of a placement.

    Args:
        placement: Where everything lives and updates.
        order: Unit indices in the order in which the next forward needs them.

    Returns:
        Gradient operations in reverse order, then the agreement, then updates in `order`.
    """
    builder = _Builder()
    by_index = {unit.layout.index: unit for unit in placement.units}
    norms, lands = [], {}
    for index in reversed(order):
        norm, land = _gradient_ops(builder, by_index[index], placement)
        norms.append(norm)
        lands[index] = land
    step = Trigger(TriggerKind.STEP)
    agree = builder.add(OpKind.AGREE, Lane.COMPUTE, step, after=tuple(norms))
    for index in order:
        unit = by_index[index]
        on_host = unit.update is UpdatePlace.HOST
        lane = Lane.HOST if on_host else Lane.COMPUTE
        update = builder.add(OpKind.UPDATE, lane, step, unit=index, after=(agree, lands[index]))
        if on_host:
            builder.add(
                OpKind.PUBLISH,
                Lane.UP,
                step,
                unit=index,
                nbytes=_unit_bytes(unit),
                after=(update,),
            )
    return Program(ops=tuple(builder.ops), backwards=placement.backwards_per_update)
