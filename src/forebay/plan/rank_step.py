"""One rank of a cluster on a clock: passes, collectives, streamed weights, state on drives.

Ranks are alike, so that one stands for thousands: what a node shares is divided by its ranks, and
a collective takes what its slowest part takes. Blocks are merged to at most a few dozen units: a
finer grain changes a step by the time of one unit.

[Note: a rank's step] For each unit u, in the order of the forward,
    forward    [read weights] -> [bring up] -> [gather] -> compute; the next unit's come meanwhile
    backward   the same; then [reduce] -> [land]
    update     agree on the norm -> [read state] -> update -> [write state]
               -> [weights up] -> [gather], which the next forward of u waits for
each on a lane of its own: compute, ranks, up, down, host, read, write. What is in brackets depends
on the setup. Lanes that touch host memory share its bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forebay.plan.fluid import Meeting, Task, run
from forebay.plan.setup import Home, Overlap
from forebay.plan.timeline import Interval, Row, Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.plan.fluid import Span
    from forebay.plan.setup import Setup

__all__ = ["RankRates", "RankStep", "RankUnit", "simulate_rank"]

# Windows: the first fills the pipeline, the difference of the last two is a step.
_WINDOWS = 3
# Micro-batches of a window that are simulated; the rest take as long as the last of these.
_BACKWARDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUnit:
    """A unit as one rank sees it.

    Attributes:
        name: For the timeline.
        forward: Seconds of a forward.
        backward: Seconds of a backward, recomputation included.
        weights: Bytes of its working weights, whole.
        gradients: Bytes of its gradients, whole.
        own_weights: Bytes of this rank's slice.
        own_gradients: Bytes of this rank's slice.
        update: Bytes of memory traffic of this rank's update.
        state_read: Bytes that this rank reads from drives for an update.
        state_written: Bytes that it writes.
    """

    name: str
    forward: float
    backward: float
    weights: float
    gradients: float
    own_weights: float
    own_gradients: float
    update: float
    state_read: float
    state_written: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRates:
    """One rank's share of its node, bytes per second.

    Attributes:
        up: Link to the device.
        down: Link to the host.
        host_memory: What update and copies reach together.
        update: What the host's update reaches alone.
        device_update: What an update on the device reaches.
        read: From drives.
        write: To drives.
        files: From and to drives at once, together; None for the sum of both.
        gather: Whole bytes per second of a collective among all ranks.
        latency_seconds: Of a collective.
    """

    up: float
    down: float
    host_memory: float
    update: float
    device_update: float
    read: float
    write: float
    files: float | None = None
    gather: float
    latency_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """What is predicted.

    Attributes:
        seconds: Of one update.
        timeline: The windows that were simulated.
        busy: Seconds of each lane in one update, by name.
    """

    seconds: float
    timeline: Timeline
    busy: dict[str, float]


@dataclass(slots=True)
class _Draft:
    tasks: list[Task] = field(default_factory=list)
    shown: list[tuple[Row, str, int]] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)

    def add(self, lane: str, what: tuple[Row, str, float], rate: float, **kind: object) -> int:
        row, name, work = what
        memory = float(kind.get("memory", 0.0))  # type: ignore[arg-type]
        after = tuple(i for i in kind.get("after", ()) if i >= 0)  # type: ignore[attr-defined]
        self.tasks.append(Task(lane=lane, work=work, rate=rate, memory=memory, after=after))
        self.shown.append((row, name, int(work) if row in (Row.UP, Row.DOWN) else 0))
        return len(self.tasks) - 1


class _Rank:
    """Collects the tasks of windows."""

    def __init__(
        self, units: Sequence[RankUnit], *, setup: Setup, rates: RankRates, backwards: int
    ) -> None:
        self.units = units
        self.setup = setup
        self.rates = rates
        self.backwards = backwards
        self.draft = _Draft()
        self.ends: list[int] = []
        # The compute stream is a queue: its last two tasks.
        self.stream = [-1, -1]
        self.gathers = setup.stage == 3 and setup.ranks > 1
        self.reduces = setup.ranks > 1
        self.streams = setup.weights is not Home.DEVICE
        self.lands = setup.optimizer is not Home.DEVICE

    def _compute(self, name: str, seconds: float, after: tuple[int, ...]) -> int:
        what = (Row.COMPUTE, name, seconds)
        index = self.draft.add("compute", what, 1.0, after=(self.stream[1], *after))
        self.stream = [self.stream[1], index]
        return index

    def _collective(self, name: str, nbytes: float, after: tuple[int, ...]) -> int:
        seconds = nbytes / self.rates.gather + self.rates.latency_seconds
        if self.setup.habits.collectives is Overlap.AFTER:
            return self._compute(name, seconds, after)
        return self.draft.add("ranks", (Row.RANKS, name, seconds), 1.0, after=after)

    def _weights(self, unit: RankUnit, after: tuple[int, ...]) -> tuple[int, ...]:
        """What must have come before a unit computes; it starts while the one before computes."""
        came = (self.stream[0], *after)
        if self.setup.weights is Home.NVME:
            what = (Row.READ, f"read weights {unit.name}", unit.own_weights)
            came = (self.draft.add("read", what, self.rates.read, memory=1.0, after=came),)
        if self.streams:
            what = (Row.UP, f"bring {unit.name}", unit.own_weights)
            came = (self.draft.add("up", what, self.rates.up, memory=1.0, after=came),)
        if self.gathers:
            came = (self._collective(f"gather {unit.name}", unit.weights, came),)
        return came if self.streams or self.gathers else after

    def window(self, ready: dict[int, int]) -> dict[int, int]:
        """One window; `ready` is what each unit's first forward waits for."""
        landed: dict[int, int] = {}
        for turn in range(self.backwards):
            for place, unit in enumerate(self.units):
                after = (ready[place],) if turn == 0 and place in ready else ()
                self._compute(f"forward {unit.name}", unit.forward, self._weights(unit, after))
            begun = self.stream[1]
            for place in reversed(range(len(self.units))):
                unit = self.units[place]
                done = self._compute(
                    f"backward {unit.name}", unit.backward, self._weights(unit, ())
                )
                landed[place] = self._gradient(unit, done, turn=turn)
        self.ends.append(self.stream[1])
        return self._update(landed, begun)

    def _gradient(self, unit: RankUnit, done: int, *, turn: int) -> int:
        """Reduced in every backward from stage 2 on, else in the last; lands on the host."""
        last = turn == self.backwards - 1
        if self.reduces and (self.setup.stage >= 2 or last):
            whole = unit.gradients * (2 if self.setup.stage == 0 else 1)
            done = self._collective(f"reduce {unit.name}", whole, (done,))
        if self.lands:
            what = (Row.DOWN, f"land {unit.name}", unit.own_gradients)
            # Sums on the host read and write fp32 beside what lands.
            memory = 1.0 if self.backwards == 1 else 6.0
            done = self.draft.add("down", what, self.rates.down, memory=memory, after=(done,))
        return done

    def _update(self, landed: dict[int, int], begun: int) -> dict[int, int]:
        # The clip factor needs every gradient.
        agree = self.draft.add(
            "agree", (Row.RANKS, "agree", 0.0), 1.0, after=tuple(landed.values())
        )
        ready: dict[int, int] = {}
        for place, unit in enumerate(self.units):
            after: tuple[int, ...] = (agree,)
            if self.setup.optimizer is Home.NVME:
                # Reading needs no clip factor: buffers fill from the begin of backward on, and each
                # unit's when the update two before it has left them.
                free = ready.get(place - 2, begun)
                what = (Row.READ, f"read {unit.name}", unit.state_read)
                read = self.draft.add("read", what, self.rates.read, memory=1.0, after=(free,))
                after = (agree, read)
            ready[place] = self._one_update(unit, after)
        if self.setup.habits.update is Overlap.AFTER:
            end = self._compute("updates", 0.0, tuple(ready.values()))
            ready = dict.fromkeys(ready, end)
        return ready

    def _one_update(self, unit: RankUnit, after: tuple[int, ...]) -> int:
        if not self.lands:
            seconds = unit.update / self.rates.device_update
            done = self._compute(f"update {unit.name}", seconds, after)
        else:
            what = (Row.HOST_UPDATE, f"update {unit.name}", unit.update)
            done = self.draft.add("host", what, self.rates.update, memory=1.0, after=after)
        if self.setup.optimizer is Home.NVME:
            what = (Row.WRITE, f"write {unit.name}", unit.state_written)
            written = self.draft.add("write", what, self.rates.write, memory=1.0, after=(done,))
            if self.setup.habits.update is Overlap.AFTER:
                done = written
        if self.streams:
            return done
        if self.lands:
            what = (Row.UP, f"publish {unit.name}", unit.own_weights)
            done = self.draft.add("up", what, self.rates.up, memory=1.0, after=(done,))
        if self.reduces and self.setup.stage in (1, 2):
            done = self._collective(f"gather {unit.name}", unit.weights, (done,))
        return done


def simulate_rank(units: Sequence[RankUnit], *, setup: Setup, rates: RankRates) -> RankStep:
    """Predict a step of one rank; see [Note: a rank's step].

    Args:
        units: In the order of the forward.
        setup: What is shared and where it lives.
        rates: This rank's share of its node.
    """
    wanted = setup.workload.accumulation
    seconds, spans, rank = _run(units, setup, rates, backwards=min(wanted, _BACKWARDS))
    if wanted > _BACKWARDS:
        fewer, _, _ = _run(units, setup, rates, backwards=_BACKWARDS - 1)
        seconds += (wanted - _BACKWARDS) * max(seconds - fewer, _passes(units))
    return RankStep(seconds=seconds, timeline=_timeline(rank, spans), busy=_busy(rank, spans))


def _passes(units: Sequence[RankUnit]) -> float:
    return sum(unit.forward + unit.backward for unit in units)


def _run(
    units: Sequence[RankUnit], setup: Setup, rates: RankRates, *, backwards: int
) -> tuple[float, list[Span], _Rank]:
    rank = _Rank(units, setup=setup, rates=rates, backwards=backwards)
    ready: dict[int, int] = {}
    for _ in range(_WINDOWS):
        ready = rank.window(ready)
    meetings = []
    if rates.files is not None:
        meetings.append(Meeting(lanes=frozenset({"read", "write"}), total=rates.files))
    spans = run(rank.draft.tasks, memory=rates.host_memory, meetings=meetings)
    ends = [spans[index].end for index in rank.ends]
    return ends[-1] - ends[-2], spans, rank


def _timeline(rank: _Rank, spans: Sequence[Span]) -> Timeline:
    return Timeline.of(
        rank.setup.label,
        (
            Interval(row=row, begin=span.begin, end=span.end, name=name, nbytes=nbytes)
            for (row, name, nbytes), span in zip(rank.draft.shown, spans, strict=True)
            if span.end > span.begin
        ),
    )


def _busy(rank: _Rank, spans: Sequence[Span]) -> dict[str, float]:
    """Seconds of each lane in the windows that were simulated, over their number."""
    found: dict[str, float] = {}
    for task, span in zip(rank.draft.tasks, spans, strict=True):
        lane = str(task.lane)
        found[lane] = found.get(lane, 0.0) + (span.end - span.begin) / _WINDOWS
    return found
