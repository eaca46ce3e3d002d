"""What an engine has of its ranks: how gradients depart, and the queue behind it."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forebay.comm.collectives import Collectives, Purpose
from forebay.comm.passes import Passes
from forebay.comm.queue import Queue
from forebay.comm.same import different_texts, mark_of
from forebay.engine.departure import Alone
from forebay.engine.reducer import Reducer
from forebay.engine.same_terms import SameTerms
from forebay.engine.shared_gradients import SharedGradients
from forebay.errors import RankError
from forebay.optim.clip import ordered_sum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.engine.departure import Departure
    from forebay.engine.executor import Executor
    from forebay.engine.options import EngineOptions
    from forebay.engine.record import ParamRecord
    from forebay.engine.streaming import Streaming
    from forebay.engine.terms import UpdateTerms
    from forebay.engine.unit import Unit

__all__ = ["Ranks", "connect_ranks", "queue_of"]


class Ranks:
    """The ranks of one engine.

    Args:
        departure: How gradients leave for their update.
        queue: Runs collectives in order; None with one rank.

    Attributes:
        departure: As above.
        queue: As above; its `collectives` count bytes.
        close: Leaves the other ranks; idempotent, and without a reference to the engine.
    """

    def __init__(self, departure: Departure, *, queue: Queue | None = None) -> None:
        self.departure = departure
        self.queue = queue
        self.close = partial(_leave, queue)

    def part(self, *, failure: str | None) -> None:
        """Leave together: what was begun ends first, on every rank, and what others still need.

        Not while an exception is handled: the others may be gone, or not be about to leave.

        Args:
            failure: Why this rank cannot go on, which the others are told instead; None if it can.
        """
        if self.queue is None:
            return
        if failure is not None:
            with contextlib.suppress(RankError):
                self.queue.collectives.group.check()  # they know of a failure that was theirs
                self.queue.collectives.group.fail(failure)
            return
        if sys.exc_info()[0] is not None:
            return
        with contextlib.suppress(RankError):
            self.queue.submit(_nothing, what="the end").wait()
            self.queue.collectives.group.part()

    def mean(self, value: float) -> float:
        """The mean of every rank's value, added in rank order; every rank calls it."""
        if self.queue is None:
            return value
        told = self.tell([value], what="a mean over ranks")
        return ordered_sum(row[0] for row in told) / len(told)

    def refuse_other(self, subject: str) -> None:
        """Whether all ranks are about to exchange the same; every rank calls it.

        Args:
            subject: What, as it is named in messages; at most one line.

        Raises:
            RankError: On every rank, when one has another subject; nothing has been exchanged.
        """
        if self.queue is None:
            return
        marks = [told for (told,) in self.tell([mark_of(subject)], what=subject)]
        group = self.queue.collectives.group
        for rank, text in enumerate(
            different_texts(subject, marks=marks, group=group, what=subject)
        ):
            if text != subject:
                raise RankError(
                    f"this rank ({group.rank}) asks for {subject}, and rank {rank} for {text}",
                    hint="every rank asks for the same parameters in the same order",
                )

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Every sharer's flat tensor, [sharers, n]; every rank calls it with one as long."""
        queue = self.queue
        assert queue is not None
        rows = own.new_empty((len(queue.collectives.group.sharers), own.numel()))

        def _gather() -> None:
            queue.collectives.gather(rows.view(-1), own, purpose=Purpose.STATE)

        queue.submit(_gather, what="whole values of sharded state").wait()
        return rows

    def take(self, own: torch.Tensor, *, rank: int) -> torch.Tensor:
        """The flat tensor of one of all ranks; every rank calls it with one as long.

        Raises:
            RankError: There is no such rank.
        """
        queue = self.queue
        assert queue is not None
        group = queue.collectives.group
        if not 0 <= rank < group.size:
            raise RankError(f"there is no rank {rank} among {group.size}")
        places = self.tell([group.copy, group.shard], what="whose values are taken")
        copy, shard = map(int, places[rank])
        held = self.gather(own)[shard].clone()  # of this copy's rank with that shard
        copies = group.size // len(group.sharers)
        if copies == 1:
            return held
        rows = held.new_empty((copies, held.numel()))
        job = queue.submit(
            lambda: queue.collectives.gather_copies(rows.view(-1), held, purpose=Purpose.STATE),
            what="the values of one rank",
        )
        job.wait()
        return rows[copy]

    def tell(self, values: Sequence[float], *, what: str) -> list[list[float]]:
        """Every rank's values, by rank; every rank calls it with as many."""
        if self.queue is None:
            return [list(values)]
        numbers = torch.tensor(list(values), dtype=torch.float64)
        rows: list[list[float]] = self.queue.tell(numbers, what=what).tolist()
        return rows


def _nothing() -> None:
    """The meeting alone counts."""


def _leave(queue: Queue | None) -> None:
    if queue is not None:
        queue.close()
        queue.collectives.group.close()


def queue_of(options: EngineOptions, *, count: int, device: torch.device) -> Queue | None:
    """The queue of this engine's collectives; None with one rank.

    Waits for the other ranks to come to the same point.

    Args:
        options: The group of ranks.
        count: Number of units.
        device: Where tensors lie.
    """
    group = options.group
    if group is None or group.size == 1:
        return None
    group.connect()
    # A step tells two marks for each unit, their order, and a mark of what the update is made with.
    passes = Passes(group, width=3 * count + 1)
    collectives = Collectives(group, exchange=options.exchange)
    return Queue(collectives, passes=passes, device=device)


def connect_ranks(
    units: Sequence[Unit],
    *,
    executor: Executor,
    options: EngineOptions,
    terms: UpdateTerms,
    on_order: Callable[[tuple[int, ...]], None],
    streaming: Streaming,
) -> Ranks:
    """The ranks that the options name.

    Args:
        units: Every unit by index.
        executor: Carries out what follows a complete gradient.
        options: The group of ranks.
        terms: What updates are made with, which must be the same everywhere.
        on_order: Told of the order in which units run, when it changes.
        streaming: Takes a unit's new slices, where each pass gathers them.
    """
    group = options.group
    if group is None or group.size == 1:
        return Ranks(Alone(executor, on_order=on_order, count=len(units)))
    queue = executor.lanes.ranks
    assert queue is not None
    gradients = SharedGradients(units, lanes=executor.lanes, local=executor.local)
    executor.use(gradients)
    reducer = Reducer(
        units,
        executor=executor,
        gradients=gradients,
        queue=queue,
        options=options,
        on_order=on_order,
    )
    reducer.terms = SameTerms(terms, group=group)
    if options.stage:

        def _spread(unit: Unit, changed: Sequence[ParamRecord], arrivals: Sequence[Any]) -> None:
            if unit.streams_weights:
                streaming.renew(unit, changed, arrivals)
            else:
                reducer.spread_weights(streaming.nans, unit, changed, arrivals)

        executor.spread = _spread
    return Ranks(reducer, queue=queue)
