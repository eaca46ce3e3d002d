"""The operations of one window and one update, as a graph: what the engine will do.

An operation names its lane, its bytes on the link, its predecessors and the trigger that starts
it. A graph, not a list: an operation whose trigger never comes (a branch not taken) is not
done, and one whose trigger comes early or late waits for its predecessors alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from forebay.model.layout import ITEM_BYTES, SUM_ITEM_BYTES
from forebay.plan.file_pieces import held_pieces
from forebay.plan.load_ops import load_ops
from forebay.plan.loads import Uses
from forebay.plan.ops import UPDATING, Lane, Op, OpKind, Trigger, TriggerKind, Turn
from forebay.plan.placement import Accumulation, UpdatePlace, WeightPlace
from forebay.plan.policies import Delayed, DuringBackward
from forebay.plan.policy_bytes import speculates
from forebay.plan.records import records
from forebay.plan.unit_bytes import (
    state_bytes,
    sum_bytes,
    unit_bytes,
    weight_file_bytes,
    whole_bytes,
)
from forebay.plan.zenflow import ZenFlow
from forebay.plan.zenflow_ops import zenflow_ops

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from forebay.plan.placement import Placement, UnitPlacement
    from forebay.plan.records import Record

__all__ = [
    "UPDATING",
    "Lane",
    "Op",
    "OpKind",
    "Program",
    "Trigger",
    "TriggerKind",
    "Turn",
    "build_program",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """All operations of one window of `backwards` backwards and its update.

    Attributes:
        ops: Every operation.
        backwards: Backwards in the window.
        updates: Those of `ops` that update units and bring the results home, in order.
        updates_early: Whether some of them begin with a gradient, before the step.
    """

    ops: tuple[Op, ...]
    backwards: int
    _started_by: dict[Trigger, list[Op]] = field(init=False, repr=False, compare=False)
    updates: tuple[Op, ...] = field(init=False, repr=False, compare=False)
    updates_early: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        started_by: dict[Trigger, list[Op]] = {}
        for op in self.ops:
            started_by.setdefault(op.trigger, []).append(op)
        object.__setattr__(self, "_started_by", started_by)
        updates = tuple(op for op in self.ops if op.kind in UPDATING or op.kind is OpKind.STORE)
        object.__setattr__(self, "updates", updates)
        early = any(op.trigger.kind is TriggerKind.GRADIENT for op in updates)
        object.__setattr__(self, "updates_early", early)

    def at(self, trigger: Trigger) -> Sequence[Op]:
        """The operations that a trigger starts, in order."""
        return self._started_by.get(trigger, ())

    def updates_with_gradient(self, unit: int) -> bool:
        """Whether a unit's update begins with its gradient, before the step."""
        begun = self.at(Trigger(TriggerKind.GRADIENT, unit))
        return any(op.kind in UPDATING for op in begun)

    def traffic(self, lane: Lane) -> int:
        """Bytes over a lane per update, when every gradient is present in every backward.

        Over a whole period where windows differ, divided by its windows.
        """
        times = {Turn.EVERY: self.backwards, Turn.EARLIER: self.backwards - 1, Turn.LAST: 1}
        return sum(op.nbytes * times[op.turn] // op.every for op in self.ops if op.lane is lane)

    @property
    def period(self) -> int:
        """Windows after which everything comes again."""
        return max((op.every for op in self.ops), default=1)


class _Builder:
    """Operations so far, and each unit's pieces that come from files and go back."""

    def __init__(self, placement: Placement) -> None:
        self.ops: list[Op] = []
        held = held_pieces(placement)
        self.coming = {
            unit.layout.index: _records(unit, placement, held[unit.layout.index])
            for unit in placement.units
            if unit.update is UpdatePlace.NVME
        }

    def add(self, op: Op) -> int:
        """Append an operation under the next number, which is returned."""
        index = len(self.ops)
        self.ops.append(replace(op, index=index))
        return index


def _gradient_ops(builder: _Builder, unit: UnitPlacement, placement: Placement) -> tuple[int, int]:
    """Add one unit's gradient operations; returns (what AGREE waits for, what UPDATE waits for)."""
    reduced: tuple[int, ...] = ()
    if placement.sharding.size > 1:
        reduced = (builder.add(_reduce(unit, placement)),)
    if unit.update is UpdatePlace.STREAMED:
        return _streamed_ops(builder, unit, placement, reduced)
    index = unit.layout.index
    trigger = Trigger(TriggerKind.GRADIENT, index)
    if unit.update.lands and placement.accumulation is Accumulation.HOST_SUM:
        folded = builder.add(_fold(unit, placement, Turn.EVERY))
        squares = Op(kind=OpKind.NORM, lane=Lane.HOST, unit=index, after=(folded,), trigger=trigger)
        return builder.add(squares), folded
    norm = builder.add(
        Op(kind=OpKind.NORM, lane=Lane.COMPUTE, unit=index, trigger=trigger, after=reduced)
    )
    if unit.update is UpdatePlace.DEVICE:
        return norm, norm
    summed = placement.accumulation is Accumulation.DEVICE_SUM or placement.sharding.size > 1
    item = SUM_ITEM_BYTES if summed else None
    land = Op(
        kind=OpKind.LAND,
        lane=Lane.DOWN,
        unit=index,
        nbytes=unit_bytes(unit, placement, item),
        after=(norm,),
        trigger=trigger,
    )
    return norm, builder.add(land)


def _streamed_ops(
    builder: _Builder, unit: UnitPlacement, placement: Placement, reduced: tuple[int, ...]
) -> tuple[int, int]:
    """As `_gradient_ops`: earlier backwards are summed on the host, and the sum comes up."""
    index = unit.layout.index
    trigger = Trigger(TriggerKind.GRADIENT, index)
    before: tuple[int, ...] = ()
    if placement.accumulation is Accumulation.HOST_SUM:
        before = (builder.add(_fold(unit, placement, Turn.EARLIER)),)
    fetch = Op(
        kind=OpKind.FETCH,
        lane=Lane.UP,
        unit=index,
        nbytes=state_bytes(unit, placement) + sum_bytes(unit, placement),
        after=before,
        trigger=Trigger(TriggerKind.BACKWARD),
    )
    fetched = builder.add(fetch)
    keep = Op(kind=OpKind.KEEP, lane=Lane.COMPUTE, unit=index, trigger=trigger)
    norm = Op(kind=OpKind.NORM, lane=Lane.COMPUTE, unit=index, trigger=trigger, after=reduced)
    if not before:
        normed = builder.add(norm)
        builder.add(replace(keep, after=(normed,)))
        return normed, fetched
    # where the gradient is kept its sum is completed; only then are there squares of it
    kept = builder.add(replace(keep, after=(fetched,)))
    return builder.add(replace(norm, after=(kept,))), fetched


def _fold(unit: UnitPlacement, placement: Placement, turn: Turn) -> Op:
    index = unit.layout.index
    return Op(
        kind=OpKind.LAND_FOLD,
        lane=Lane.DOWN,
        unit=index,
        nbytes=unit_bytes(unit, placement),
        trigger=Trigger(TriggerKind.GRADIENT, index),
        turn=turn,
    )


def _reduce(unit: UnitPlacement, placement: Placement) -> Op:
    """Bytes: the whole exchange's, padding included; of it a rank sends (size - 1) / size."""
    sharding = placement.sharding
    wide = placement.keeps_local_sums and placement.accumulation is not Accumulation.SINGLE
    gathers_sums = SUM_ITEM_BYTES if sharding.stage == 0 else 0
    return Op(
        kind=OpKind.REDUCE,
        lane=Lane.RANKS,
        unit=unit.layout.index,
        nbytes=sum(
            ((SUM_ITEM_BYTES if wide else ITEM_BYTES[part.dtype]) + gathers_sums) * part.elements
            for part in unit.layout.parts
        ),
        trigger=Trigger(TriggerKind.GRADIENT, unit.layout.index),
        turn=Turn.LAST if placement.keeps_local_sums else Turn.EVERY,
    )


def _gather(unit: UnitPlacement, after: int) -> Op:
    return Op(
        kind=OpKind.GATHER,
        lane=Lane.RANKS,
        unit=unit.layout.index,
        # weights that come and go are gathered by the passes that use them
        nbytes=whole_bytes(unit) if unit.weights is WeightPlace.DEVICE else 0,
        after=(after,),
        trigger=Trigger(TriggerKind.STEP),
    )


def _updates_early(unit: UnitPlacement, placement: Placement) -> bool:
    """Whether a unit updates as soon as its gradient is complete.

    Not where backward may still bring its weights up from where they are updated, nor where state
    comes from files in an order of its own, nor where ranks have a sum to make first.
    """
    stays = unit.weights is WeightPlace.DEVICE and unit.update is not UpdatePlace.NVME
    if speculates(placement.policy, update=unit.update, weights=unit.weights):
        return True  # and the step takes it, as far as a program can tell
    alone = stays and placement.sharding.size == 1
    return alone and isinstance(placement.policy, DuringBackward)


def build_program(
    placement: Placement, *, order: Sequence[int], uses: Uses | None = None
) -> Program:
    """The program of a placement.

    Args:
        placement: Where everything lives and updates.
        order: Unit indices in the order in which the next forward needs them; frozen ones that it
            names are loaded, and no more.
        uses: What passes use of the weights that come and go; None for what `order` lets expect.

    Returns:
        Gradient operations in reverse order, then the agreement, then updates in `order`.
    """
    builder = _Builder(placement)
    for op in load_ops(placement, uses=uses or Uses.expected(placement, order=order)):
        builder.add(op)
    by_index = {unit.layout.index: unit for unit in placement.units}
    order = [index for index in order if index in by_index]
    norms, lands = [], {}
    for index in reversed(order):
        norm, land = _gradient_ops(builder, by_index[index], placement)
        norms.append(norm)
        lands[index] = land
    step = Trigger(TriggerKind.STEP)
    agreement = Op(kind=OpKind.AGREE, lane=Lane.COMPUTE, after=tuple(norms), trigger=step)
    agree = builder.add(agreement)
    reads = _read_bytes(order, placement, builder.coming)
    for index in order:
        early = _updates_early(by_index[index], placement)
        after: tuple[int, ...] = (lands[index],) if early else (agree, lands[index])
        if by_index[index].update is UpdatePlace.NVME:
            read = Op(
                kind=OpKind.READ,
                lane=Lane.READ,
                unit=index,
                nbytes=reads[index],
                trigger=Trigger(TriggerKind.BACKWARD),
            )
            after = (*after, builder.add(read))
        zenflow = isinstance(placement.policy, ZenFlow)
        if zenflow and by_index[index].update is UpdatePlace.HOST:
            first = len(builder.ops)
            for op in zenflow_ops(by_index[index], placement, after=after, first=first):
                builder.add(op)
        elif isinstance(placement.policy, Delayed):
            _delayed_ops(builder, by_index[index], placement, after)
        else:
            _update_ops(builder, by_index[index], placement, after)
    return Program(ops=tuple(builder.ops), backwards=placement.backwards_per_update)


def _update_ops(
    builder: _Builder, unit: UnitPlacement, placement: Placement, after: tuple[int, ...]
) -> None:
    """Add one unit's update and what follows it."""
    index, step = unit.layout.index, Trigger(TriggerKind.STEP)
    begins = Trigger(TriggerKind.GRADIENT, index) if _updates_early(unit, placement) else step
    update = Op(
        kind=OpKind.UPDATE,
        lane=Lane.HOST if unit.update.lands else Lane.COMPUTE,
        unit=index,
        after=after,
        trigger=begins,
    )
    updated = last = builder.add(update)
    follows: list[tuple[OpKind, Lane, int]] = []
    if unit.update is UpdatePlace.STREAMED:
        follows.append((OpKind.WRITE_BACK, Lane.DOWN, state_bytes(unit, placement)))
    if unit.update.lands:
        # weights off the device are loaded by the passes that use them
        up = 0 if unit.weights.is_off_device else unit_bytes(unit, placement)
        follows.append((OpKind.PUBLISH, Lane.UP, up))
    if unit.update is UpdatePlace.NVME:
        nbytes = sum(record.nbytes for record in builder.coming[index])
        if unit.weights is WeightPlace.NVME:
            nbytes += weight_file_bytes(unit, placement)
        follows.append((OpKind.STORE, Lane.WRITE, nbytes))
    for kind, lane, nbytes in follows:
        when = begins if kind is OpKind.WRITE_BACK else step
        added = builder.add(
            Op(kind=kind, lane=lane, unit=index, nbytes=nbytes, after=(updated,), trigger=when)
        )
        last = last if kind is OpKind.STORE else added
    if placement.gathers_weights:
        builder.add(_gather(unit, last))


def _delayed_ops(
    builder: _Builder, unit: UnitPlacement, placement: Placement, after: tuple[int, ...]
) -> None:
    """As `_update_ops`: what the window before has updated comes into force, then the update."""
    index, step = unit.layout.index, Trigger(TriggerKind.STEP)
    on_device = unit.update is UpdatePlace.DEVICE
    number = len(builder.ops)
    update = number + (2 if placement.gathers_weights else 1)
    publish = Op(
        kind=OpKind.PUBLISH,
        lane=Lane.COMPUTE if on_device else Lane.UP,
        unit=index,
        nbytes=0 if on_device else unit_bytes(unit, placement),
        after_last=(update,),
        trigger=step,
    )
    published = builder.add(publish)
    if placement.gathers_weights:
        builder.add(_gather(unit, published))
    after = (*after, published)
    lane = Lane.COMPUTE if on_device else Lane.HOST
    builder.add(Op(kind=OpKind.UPDATE, lane=lane, unit=index, after=after, trigger=step))
    if unit.update is UpdatePlace.NVME:
        nbytes = sum(record.nbytes for record in builder.coming[index])
        store = Op(
            kind=OpKind.STORE,
            lane=Lane.WRITE,
            unit=index,
            nbytes=nbytes,
            after=(update,),
            trigger=step,
        )
        builder.add(store)


def _records(unit: UnitPlacement, placement: Placement, held: tuple[int, ...]) -> list[Record]:
    """A unit's pieces but for the first ones of each part, which are held."""
    return [
        record
        for part, count in zip(unit.layout.parts, held, strict=True)
        for record in records(
            placement.sharding.state(part).elements,
            piece_elements=placement.buffers.piece_elements,
        )[count:]
    ]


def _read_bytes(
    order: Sequence[int], placement: Placement, coming: Mapping[int, Sequence[Record]]
) -> dict[int, int]:
    """Bytes that each unit in files reads from the second update on."""
    every = [(index, record.nbytes) for index in order for record in coming.get(index, ())]
    kept = placement.buffers.kept(len(every))
    reads = dict.fromkeys(order, 0)
    for number, (index, nbytes) in enumerate(every):
        reads[index] += 0 if number in kept else nbytes
    return reads
