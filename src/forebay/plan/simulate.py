"""The program on a clock: what the engine will do, and when, at given bandwidths.

The same program as the engine's, interpreted over rates instead of bytes. One device; streams,
both directions of the link and the host's update share one host-memory bandwidth. A unit is the
grain: the engine's pipelining by piece inside a unit is not modelled, so that a single unit that
dominates the model is predicted too slow.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from forebay.plan.file_turns import FileTurns
from forebay.plan.fluid import Task, run
from forebay.plan.home_bytes import streamed_bytes
from forebay.plan.input_moves import InputMoves
from forebay.plan.op_costs import OpCosts, meetings
from forebay.plan.placement import WeightPlace
from forebay.plan.program import Lane, Op, OpKind, Trigger, TriggerKind, Turn
from forebay.plan.timeline import Interval, Row, Timeline
from forebay.plan.unit_bytes import load_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.plan.fluid import Span
    from forebay.plan.placement import Placement
    from forebay.plan.program import Program
    from forebay.plan.solve import Rates

__all__ = ["ComputeSeconds", "ScheduledOp", "Simulation", "simulate"]

# The last of these that a unit has makes its new weights ready.
_RENEWS = (OpKind.UPDATE, OpKind.PUBLISH, OpKind.GATHER)
_ROWS = MappingProxyType(
    {
        Lane.UP: Row.UP,
        Lane.DOWN: Row.DOWN,
        Lane.HOST: Row.HOST_UPDATE,
        Lane.READ: Row.READ,
        Lane.WRITE: Row.WRITE,
        Lane.RANKS: Row.RANKS,
    }
)
# Of operations on the device, those that take time on its one stream.
_ON_STREAM = (OpKind.UPDATE, OpKind.IMPORTANT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSeconds:
    """What computation takes, by unit index.

    Attributes:
        forward: One forward of one micro-batch.
        backward: One backward, recomputation included.
        inputs: Bytes of each unit's input that wait on the host from forward to backward, of all
            micro-batches that pass together; empty where inputs stay.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    inputs: tuple[int, ...] = ()

    def times(self, count: int) -> ComputeSeconds:
        """Of so many micro-batches, one after the other."""
        return replace(
            self,
            forward=tuple(count * one for one in self.forward),
            backward=tuple(count * one for one in self.backward),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledOp:
    """One execution of an operation."""

    op: Op
    window: int
    backward: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What is predicted.

    Attributes:
        timeline: Everything that runs, from the first window's forward.
        ops: Every execution of every operation.
        step_seconds: From one window's end of backward to the next one's, once the pipeline is
            full.
    """

    timeline: Timeline
    ops: tuple[ScheduledOp, ...]
    step_seconds: float


@dataclass(slots=True)
class _Draft:
    """Tasks with what they are shown as, while they are collected."""

    tasks: list[Task] = field(default_factory=list)
    shown: list[tuple[Row, str, int] | None] = field(default_factory=list)
    ops: dict[tuple[int, int, int], int] = field(default_factory=dict)
    # The compute stream is a queue: its last task.
    stream: tuple[int, ...] = ()

    def add(self, task: Task, shown: tuple[Row, str, int] | None = None) -> int:
        self.tasks.append(task)
        self.shown.append(shown)
        return len(self.tasks) - 1

    def compute(
        self, seconds: float, after: tuple[int, ...], shown: tuple[Row, str, int] | None
    ) -> int:
        task = Task(lane=Lane.COMPUTE, work=seconds, after=(*self.stream, *after))
        index = self.add(task, shown)
        self.stream = (index,)
        return index


class _Interpreter:
    """Turns windows of a program into tasks."""

    def __init__(
        self,
        program: Program,
        *,
        placement: Placement,
        rates: Rates,
        compute: ComputeSeconds,
        order: Sequence[int],
    ) -> None:
        self._program = program
        every = (*placement.units, *placement.frozen)
        self._units = {unit.layout.index: unit for unit in every}
        self._costs = OpCosts(placement, rates=rates)
        self._compute = compute.times(placement.micro_batches)
        self._order = tuple(order)
        self._inputs = dict(enumerate(compute.inputs))
        self._micro_batches = placement.micro_batches
        # Bytes in the pool of each unit that comes and goes.
        self._pooled = {
            u.layout.index: streamed_bytes(u.layout)
            for u in every
            if u.weights is not WeightPlace.DEVICE
        }
        self._pool_bytes = placement.pool_bytes
        # Uses so far of such units: which, and the task that used it.
        self._uses: list[tuple[int, int]] = []
        self._files = FileTurns(program, placement)
        self._placement = placement
        # The last transfer of new weights home, of units that the next forward loads from there.
        self._at_home: dict[int, int] = {}
        self._homes = [op.index for op in program.ops if op.kind is OpKind.WRITE_BACK]
        self.draft = _Draft()
        self.ends: list[int] = []

    def window(self, number: int, ready: dict[int, int]) -> dict[int, int]:
        """One window; `ready` is what each unit's first forward waits for.

        Returns:
            What each unit's first forward in the next window waits for.
        """
        draft = self.draft
        last = self._program.backwards - 1
        for backward in range(self._program.backwards):
            moves = self._input_moves()
            for unit in self._order:
                after: tuple[int, ...] = (ready[unit],) if not backward and unit in ready else ()
                if not backward and unit == self._order[-1]:
                    # Its activations (the logits) want the memory of state that visited.
                    after += tuple(self._gone_home(number))
                shown = (Row.COMPUTE, f"forward {self._name(unit)}", 0)
                use = Trigger(TriggerKind.FORWARD_USE, unit)
                after += self._loads(use, number, backward, after) + moves.before_forward()
                done = draft.compute(self._compute.forward[unit], after, shown)
                moves.computed(unit, by=done)
                self._used(unit, done)
            if backward == last:
                begun = draft.stream
                self._ops(TriggerKind.BACKWARD, None, number, backward, begun)
            for unit in reversed(self._order):
                shown = (Row.COMPUTE, f"backward {self._name(unit)}", 0)
                use = Trigger(TriggerKind.BACKWARD_USE, unit)
                after = self._loads(use, number, backward, ())
                after += moves.before_backward(unit, after=draft.stream)
                done = draft.compute(self._compute.backward[unit], after, shown)
                self._used(unit, done)
                self._ops(TriggerKind.GRADIENT, unit, number, backward, (done,))
        self.ends.append(draft.stream[0])
        self._ops(TriggerKind.STEP, None, number, last, draft.stream)
        return self._ready(number, last)

    def _input_moves(self) -> InputMoves:
        def _add(op: Op, after: tuple[int, ...]) -> int:
            assert op.unit is not None
            name = f"input of {self._name(op.unit)}"
            return self.draft.add(self._costs.task(op, after), _shown(op, name))

        return InputMoves(
            self._inputs, order=self._order, micro_batches=self._micro_batches, add=_add
        )

    def _loads(
        self, use: Trigger, window: int, backward: int, after: tuple[int, ...]
    ) -> tuple[int, ...]:
        """What brings a unit's weights up for a pass, as early as the pool has room for them.

        What one pass alone loads is loaded by the first forward, or by the last backward.
        """
        assert use.unit is not None
        first = use.kind is TriggerKind.FORWARD_USE
        is_once = backward == (0 if first else self._program.backwards - 1)
        found: list[int] = []
        loads = self._program.at(use)
        room = self._room_for(use.unit) if loads else ()
        for op in loads:
            if op.turn is Turn.EVERY or is_once:
                before = (*after, *room, *self._before(op, window, backward))
                name = f"{op.kind.value} {self._name(use.unit)}"
                index = self.draft.add(self._costs.task(op, before), _shown(op, name))
                self.draft.ops[op.index, window, backward] = index
                found.append(index)
        return tuple(found)

    def _used(self, unit: int, task: int) -> None:
        if unit in self._pooled:
            self._uses.append((unit, task))

    def _room_for(self, unit: int) -> tuple[int, ...]:
        """The last use that has to end before a unit has room: those after it fill the pool."""
        held, left = {unit}, self._pool_bytes - self._pooled[unit]
        for other, task in reversed(self._uses):
            if other not in held:
                held.add(other)
                left -= self._pooled[other]
                if left < 0:
                    return (task,)
        return ()

    def _ops(
        self,
        kind: TriggerKind,
        unit: int | None,
        window: int,
        backward: int,
        started: tuple[int, ...],
    ) -> None:
        last = backward == self._program.backwards - 1
        for op in self._program.at(Trigger(kind, unit)):
            if op.turn is (Turn.EARLIER if last else Turn.LAST) or (window + 1) % op.every:
                continue
            if op.kind is OpKind.READ:
                self._read(op, window, started, nbytes=self._files.ahead_bytes(op))
                continue
            read = self._files.read_of(op)
            if read is not None:
                agreed = (*started, *self._before(op, window, backward))
                rest = read.nbytes - self._files.ahead_bytes(read)
                self._read(read, window, agreed, nbytes=rest)
            before = self._before(op, window, backward)
            moved = self._without_weights(op, (*started, *before))
            task = self._costs.task(moved, (*started, *before))
            name = op.kind.value if op.unit is None else f"{op.kind.value} {self._name(op.unit)}"
            on_stream = op.lane is Lane.COMPUTE and op.kind in _ON_STREAM
            if on_stream:
                shown = (Row.DEVICE_UPDATE, name, 0)
                index = self.draft.compute(task.work, task.after, shown)
            else:
                index = self.draft.add(task, _shown(moved, name))
            self.draft.ops[op.index, window, backward] = index

    def _without_weights(self, op: Op, after: tuple[int, ...]) -> Op:
        """Of a streamed unit's way home its weights, if they live there, go first: the rest."""
        unit = None if op.unit is None else self._units[op.unit]
        if op.kind is not OpKind.WRITE_BACK or unit is None or not unit.weights.is_off_device:
            return op
        assert op.unit is not None
        first = replace(op, nbytes=load_bytes(unit, self._placement))
        task = replace(self._costs.task(first, after), priority=op.index)
        name = f"{op.kind.value} {self._name(op.unit)}"
        self._at_home[op.unit] = self.draft.add(task, _shown(first, name))
        return replace(op, nbytes=op.nbytes - first.nbytes)

    def _read(self, op: Op, window: int, after: tuple[int, ...], *, nbytes: float) -> None:
        """A part of a read of state from files, when there is a buffer for it."""
        last, ops = self._program.backwards - 1, self.draft.ops
        frees = self._files.frees(op, window)
        freed = None if frees is None else ops.get((*frees, last))
        before = [task for task in (freed, ops.get((op.index, window, last))) if task is not None]
        part = replace(op, nbytes=round(nbytes))
        task = self._costs.task(part, (*after, *before))
        name = f"{op.kind.value} {self._name(op.unit)}" if op.unit is not None else op.kind.value
        ops[op.index, window, last] = self.draft.add(task, _shown(part, name))

    def _before(self, op: Op, window: int, backward: int) -> list[int]:
        """Tasks of an operation's predecessors: of this backward, or of the last that had them."""
        found = []
        for index in op.after:
            done = (self.draft.ops.get((index, window, b)) for b in range(backward, -1, -1))
            found += [task for task in done if task is not None][:1]
        last = self._program.backwards - 1
        before = (self.draft.ops.get((index, window - op.every, last)) for index in op.after_last)
        return found + [task for task in before if task is not None]

    def _gone_home(self, window: int) -> list[int]:
        """State that the last update brought to the device is home again."""
        last = self._program.backwards - 1
        done = (self.draft.ops.get((index, window - 1, last)) for index in self._homes)
        return [task for task in done if task is not None]

    def _ready(self, window: int, last: int) -> dict[int, int]:
        ready: dict[int, int] = {}
        for op in self._program.ops:
            done = self.draft.ops.get((op.index, window, last))
            if op.unit is None or op.kind not in _RENEWS or done is None:
                continue
            # of a delayed update the next forward sees nothing
            if op.kind is not OpKind.UPDATE or op.unit not in ready:
                ready[op.unit] = self._at_home.get(op.unit, done)
        return ready

    def _name(self, unit: int) -> str:
        return self._units[unit].layout.name


def _shown(op: Op, name: str) -> tuple[Row, str, int] | None:
    row = _ROWS.get(op.lane)
    return None if row is None else (row, name, op.nbytes)


def simulate(
    program: Program,
    *,
    placement: Placement,
    rates: Rates,
    compute: ComputeSeconds,
    order: Sequence[int],
    windows: int = 3,
) -> Simulation:
    """Predict a run.

    Args:
        program: What the engine executes.
        placement: The placement that it was built from.
        rates: Bandwidths.
        compute: Seconds of computation.
        order: Unit indices in the order of the forward.
        windows: Updates to run, at least two periods and one; from the second on, forwards wait for
            updates.
    """
    period = program.period
    if period > 1:
        windows = max(windows, 2 * period + 1)
    interpreter = _Interpreter(
        program, placement=placement, rates=rates, compute=compute, order=order
    )
    ready: dict[int, int] = {}
    for number in range(windows):
        ready = interpreter.window(number, ready)
    draft = interpreter.draft
    spans = run(draft.tasks, memory=rates.host_memory, meetings=meetings(rates))
    ends = [spans[index].end for index in interpreter.ends]
    return Simulation(
        timeline=Timeline.of("predicted", _intervals(draft, spans)),
        ops=tuple(
            ScheduledOp(
                op=program.ops[op],
                window=window,
                backward=backward,
                begin=spans[index].begin,
                end=spans[index].end,
            )
            for (op, window, backward), index in draft.ops.items()
        ),
        step_seconds=(ends[-1] - ends[-1 - period]) / period if len(ends) > period else ends[-1],
    )


def _intervals(draft: _Draft, spans: Sequence[Span]) -> list[Interval]:
    found, computed = [], 0.0
    for shown, span in zip(draft.shown, spans, strict=True):
        if shown is None or span.end == span.begin:
            continue
        row, name, nbytes = shown
        if row in (Row.COMPUTE, Row.DEVICE_UPDATE):
            # The stream is a queue in the order of the list: a gap before a task is a wait.
            if span.begin > computed:
                wait = f"wait before {name}"
                found.append(Interval(row=Row.WAIT, begin=computed, end=span.begin, name=wait))
            computed = span.end
        found.append(Interval(row=row, begin=span.begin, end=span.end, name=name, nbytes=nbytes))
    return found
