"""Tasks on lanes that share one bandwidth: a small event simulation.

A lane runs one task at a time. Tasks that touch host memory slow each other down in proportion
when they ask for more than it gives together; lanes that meet elsewhere too (`Meeting`) do so
there. It knows nothing of training.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

__all__ = ["Meeting", "Span", "Task", "run"]

# Work left below this share of a task is rounding.
_NOTHING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Something to do.

    Attributes:
        lane: Who does it; None takes no time and no lane.
        work: How much, in any unit.
        rate: Units of work per second when nothing interferes.
        memory: Bytes of host memory traffic per unit of work.
        after: Indices of tasks that must have ended.
        priority: On its lane, lower first; then the order of the list.
    """

    lane: Hashable | None
    work: float = 0.0
    rate: float = 1.0
    memory: float = 0.0
    after: tuple[int, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Lanes that have less together than the sum of what each has alone.

    Attributes:
        lanes: Those that share.
        total: Units of work per second of all of them, while each has a task.
        beside: A lane that must be at work too for this to hold; None for none.
    """

    lanes: frozenset[Hashable]
    total: float
    beside: Hashable | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """When a task ran."""

    begin: float
    end: float


@dataclass(slots=True)
class _State:
    tasks: Sequence[Task]
    memory: float
    meetings: Sequence[Meeting]
    now: float = 0.0
    missing: list[int] = field(default_factory=list)
    followers: list[list[int]] = field(default_factory=list)
    ready: dict[Hashable, list[tuple[int, int]]] = field(default_factory=dict)
    active: dict[Hashable, int] = field(default_factory=dict)
    left: dict[int, float] = field(default_factory=dict)
    begin: dict[int, float] = field(default_factory=dict)
    spans: dict[int, Span] = field(default_factory=dict)

    def release(self, index: int) -> None:
        """All predecessors of a task have ended."""
        stack = [index]
        while stack:
            current = stack.pop()
            task = self.tasks[current]
            if task.lane is not None and task.work > 0:
                heapq.heappush(self.ready.setdefault(task.lane, []), (task.priority, current))
            else:
                self.spans[current] = Span(self.now, self.now)
                stack += reversed(self.follow(current))

    def follow(self, index: int) -> list[int]:
        """Tasks that have waited for this one alone."""
        freed = []
        for follower in self.followers[index]:
            self.missing[follower] -= 1
            if not self.missing[follower]:
                freed.append(follower)
        return freed

    def start(self) -> None:
        """Give every free lane its next task."""
        for lane, queue in self.ready.items():
            if queue and lane not in self.active:
                _, index = heapq.heappop(queue)
                self.active[lane] = index
                self.left[index] = self.tasks[index].work
                self.begin[index] = self.now

    def advance(self) -> None:
        """Go on to the next end of a task."""
        tasks, left = self.tasks, self.left
        rates = {index: tasks[index].rate for index in self.active.values()}
        for meeting in self.meetings:
            self._meet(meeting, rates)
        wanted = sum([rate * tasks[index].memory for index, rate in rates.items()])
        if wanted > self.memory:
            slow = self.memory / wanted
            for index in rates:
                if tasks[index].memory:
                    rates[index] *= slow
        needed = {index: left[index] / rate for index, rate in rates.items()}
        step = min(needed.values())
        self.now += step
        ended = []
        for lane, index in list(self.active.items()):
            left[index] -= rates[index] * step
            # The first always ends, however its last digits were rounded.
            done = left[index] <= _NOTHING * tasks[index].work
            if done or needed[index] <= step:
                del self.active[lane]
                ended.append(index)
        for index in ended:
            self.spans[index] = Span(self.begin[index], self.now)
        for index in ended:
            for freed in self.follow(index):
                self.release(freed)

    def _meet(self, meeting: Meeting, rates: dict[int, float]) -> None:
        """Slow down what meets, in proportion."""
        if meeting.beside is not None and meeting.beside not in self.active:
            return
        met = [self.active[lane] for lane in meeting.lanes if lane in self.active]
        together = sum(rates[index] for index in met)
        if len(met) == len(meeting.lanes) and together > meeting.total:
            for index in met:
                rates[index] *= meeting.total / together


def run(tasks: Sequence[Task], *, memory: float, meetings: Sequence[Meeting] = ()) -> list[Span]:
    """When every task runs.

    Args:
        tasks: Predecessors are indices into this list; no cycles.
        memory: Bytes per second of host memory that all tasks share.
        meetings: What some lanes share beside that, applied in order.

    Raises:
        ValueError: The tasks wait for each other in a circle.
    """
    state = _State(tasks, memory, meetings)
    state.missing = [len(set(task.after)) for task in tasks]
    state.followers = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        for before in set(task.after):
            state.followers[before].append(index)
    for index in [i for i, count in enumerate(state.missing) if not count]:
        state.release(index)
    while True:
        state.start()
        if not state.active:
            break
        state.advance()
    if len(state.spans) != len(tasks):
        waiting = len(tasks) - len(state.spans)
        raise ValueError(f"{waiting} of {len(tasks)} tasks wait for each other in a circle")
    return [state.spans[index] for index in range(len(tasks))]
