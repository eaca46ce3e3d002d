"""The reducer: gradients of several ranks become sums over ranks, unit by unit during backward.

Units go in rank 0's order of the last forward, reversed, whether this rank used them or not; one
whose gradient is complete early waits for its turn. The queue does the exchange beside backward;
what follows (squares, landing) is enqueued here, in the thread that runs the hooks.

[Note: extra rounds] What a unit gets after its turn stays here and goes with its next exchange, or
at `step()` in an extra one, which all ranks make if one of them needs it. So does a parameter that
got several addends where its unit travels in 16 bits: sums travel in fp32. From the next step on
such a unit travels in fp32 at once.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

import torch

from forebay.comm.collectives import Purpose
from forebay.comm.passes import PassKind
from forebay.engine.shared_squares import PartBlocks, SharedSquares
from forebay.errors import GradientError
from forebay.optim.squares import BLOCK
from forebay.plan.placement import Accumulation, AccumulationOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from forebay.comm.queue import Job, Queue
    from forebay.engine.collector import Collector
    from forebay.engine.executor import Executor
    from forebay.engine.options import EngineOptions
    from forebay.engine.part import PartStorage
    from forebay.engine.record import ParamRecord
    from forebay.engine.same_terms import SameTerms
    from forebay.engine.shared_gradients import SharedGradients
    from forebay.engine.unit import NanSource, Unit
    from forebay.engine.window import Window
    from forebay.plan.program import Program

__all__ = ["Reducer"]

# One exchange runs while the next one's gradient is packed: more would only hold memory.
_IN_FLIGHT: Final = 2
_NONE, _PRESENT, _WITHDRAWN = 0.0, 1.0, 2.0


class Reducer:
    """Several ranks; see `forebay.engine.departure.Departure`.

    Args:
        units: Every unit by index.
        executor: Carries out what follows a sum.
        gradients: What it does with sums.
        queue: Runs collectives in order; what they are is in its `collectives`.
        options: The stage, and whether several backwards are summed.
        on_order: Told of the order in which all ranks run units, when it changes.

    Attributes:
        ranks: Their number.
        terms: Whether all ranks update with the same options; set before the first step.
    """

    terms: SameTerms

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        executor: Executor,
        gradients: SharedGradients,
        queue: Queue,
        options: EngineOptions,
        on_order: Callable[[tuple[int, ...]], None],
    ) -> None:
        self._units = units
        self._records = [record for unit in units for record in unit.records]
        self._executor = executor
        self._gradients = gradients
        self._queue = queue
        self._collectives = queue.collectives
        self._on_order = on_order
        self._stage, self._exchange_form = options.stage, options.exchange
        together = options.order is AccumulationOrder.LAYER
        self._keeps_sums = together or not self.leaves_every_backward
        self.ranks = queue.collectives.group.size
        self._passes = queue.passes
        group = queue.collectives.group
        self._squares = SharedSquares(
            list(_part_blocks(units)), sharers=len(group.sharers), shard=group.shard
        )
        self._local_order = self._order = tuple(range(len(units)))
        self._wide: set[int] = set()
        self._turns: deque[int] = deque()
        self._complete: set[int] = set()
        self._running: deque[tuple[Unit, Job, bool]] = deque()
        self._unfinished: set[int] = set()

    @property
    def leaves_every_backward(self) -> bool:
        """Stages 2 and 3 keep no full gradient."""
        return self._stage >= 2

    @property
    def is_spread(self) -> bool:
        """See `Departure`."""
        return any(part.sums.is_spread for unit in self._units for part in unit.parts)

    def begin(self, window: Window) -> None:
        """See `Departure`."""
        last = window.is_last
        self._refuse_partial_discard()
        self._turns = deque(reversed(self._order) if last or self.leaves_every_backward else ())
        self._complete.clear()
        this = self._passes.begin(PassKind.LAST_BACKWARD if last else PassKind.BACKWARD)
        self._queue.meet(lambda: self._passes.meet(this), what="the handshake of a backward")

    def _refuse_partial_discard(self) -> None:
        gone = next((r for r in self._records if _is_withdrawn(r)), None)
        if gone is not None:
            raise GradientError(
                f"p.grad of {gone.label} was cleared, but it is summed over the ranks already and "
                "other gradients of the window stay",
                hint="clear all gradients with engine.zero_grad(), or none",
            )

    def complete(self, program: Program, unit: Unit, *, last: bool) -> None:
        """See `Departure`."""
        self._complete.add(unit.index)
        self._advance(program, last=last)

    def end(self, program: Program, *, last: bool) -> None:
        """See `Departure`."""
        self._complete.update(self._turns)
        self._advance(program, last=last)

    def _advance(self, program: Program, *, last: bool) -> None:
        while self._turns and self._turns[0] in self._complete:
            unit = self._units[self._turns.popleft()]
            while len(self._running) >= _IN_FLIGHT:
                self._finish_oldest(program)
            self._exchange(unit, last=last, wide=unit.index in self._wide)
        self._pump(program)

    def has_more(self, unit: Unit) -> bool:
        """See `Departure`."""
        return any(record.has_local for record in unit.records)

    def _exchange(self, unit: Unit, *, last: bool, wide: bool) -> None:
        """Give a unit's gradients to the queue."""
        sums_locally = unit.accumulation is not Accumulation.SINGLE
        wide = wide or (sums_locally and self._keeps_sums)
        flats = [
            self._pack(part, records, wide=wide)
            for part, records in zip(unit.parts, unit.records_of_part, strict=True)
        ]
        to_all = self._stage == 0

        def _sum() -> list[torch.Tensor]:
            return [self._sum(flat, to_all=to_all) for flat in flats]

        job = self._queue.submit(_sum, what=f"the gradients of {unit.name}")
        self._running.append((unit, job, last))

    def _pack(
        self, part: PartStorage, records: Sequence[ParamRecord], *, wide: bool
    ) -> torch.Tensor:
        form = self._exchange_form
        dtype = form.travels(part.dtype, is_sum=wide)
        flat = torch.zeros(part.layout.elements, dtype=dtype, device=part.device)
        part.sums.is_spread = True
        for record in records:
            if not record.has_local:
                continue
            value = record.device_value()
            is_sum = value.dtype is torch.float32 and dtype is not torch.float32
            if is_sum and not form.rounds_sums:
                continue  # see [Note: extra rounds]
            flat[record.slot.offset : record.slot.end] = value.reshape(-1)
            record.give_away()
        self._queue.uses(flat)
        return flat

    def _sum(self, flat: torch.Tensor, *, to_all: bool) -> torch.Tensor:
        """In the queue's thread."""
        own = self._collectives.add_slices(flat)
        if not to_all:
            return own
        whole = torch.empty(flat.numel(), dtype=torch.float32, device=flat.device)
        self._collectives.gather(whole, own, purpose=Purpose.SUMS)
        return whole

    def _pump(self, program: Program) -> None:
        while self._running and self._running[0][1].done:
            self._finish_oldest(program)

    def _finish_oldest(self, program: Program) -> None:
        unit, job, last = self._running.popleft()
        with self._executor.waiting(f"sums over ranks of {unit.name}"):
            job.wait_issued()
        with self._queue.stream():
            for part, sums in zip(unit.parts, job.result, strict=True):
                if part.sums.here is None:
                    part.sums.here = sums
                else:
                    part.sums.here.add_(sums)
                self._queue.uses_here(sums)
            if last:
                self._tail(program, unit)
            else:
                self._unfinished.add(unit.index)

    def _tail(self, program: Program, unit: Unit) -> None:
        self._unfinished.discard(unit.index)
        self._executor.gradient_complete(program, unit, last=True)

    def settle(self, program: Program) -> None:
        """See `Departure`."""
        self._finish_all(program)
        self._queue.join_stream()

    def _finish_all(self, program: Program) -> None:
        while self._running:
            self._finish_oldest(program)

    def seal(self, collector: Collector, more: Sequence[Unit]) -> None:
        """See `Departure`."""
        waiting = {unit.index for unit in more}
        wide = {
            unit.index
            for unit in self._units
            if unit.index in self._wide or any(r.expected > 1 for r in unit.records)
        }
        count = range(len(self._units))
        values = [float(i in waiting) for i in count] + [float(i in wide) for i in count]
        values += [*(float(index) for index in self._local_order), self.terms.mark()]
        this = self._passes.begin(PassKind.STEP)
        job = self._queue.meet(
            lambda: self._passes.meet(this, values), what="the handshake of a step"
        )
        self._finish_all(collector.program)
        job.wait()
        rows, n = job.result, len(self._units)
        self.terms.refuse_other([row[3 * n] for row in rows])
        self._take_order(tuple(int(index) for index in rows[0][2 * n : 3 * n]))
        self._wide = {i for i in count if any(row[n + i] for row in rows)}
        for index in (i for i in reversed(self._order) if any(row[i] for row in rows)):
            self._exchange(self._units[index], last=True, wide=True)
            self._finish_all(collector.program)
        for index in sorted(self._unfinished):
            with self._queue.stream():
                self._tail(collector.program, self._units[index])
        self._queue.join_stream()
        for unit in self._units:
            if not unit.updates_on_device:
                # a reader between backward and step sent visiting state home: its sum follows
                self._executor.gradients.land(unit)

    def ran(self, order: tuple[int, ...]) -> None:
        """See `Departure`; rank 0's order is the one that counts, from `seal` on."""
        self._local_order = order

    def _take_order(self, order: tuple[int, ...]) -> None:
        if order != self._order:
            self._order = order
            self._on_order(order)

    def square_sums(self, present: Sequence[ParamRecord]) -> dict[int, float]:
        """See `Departure`.

        Raises:
            GradientError: A gradient was cleared on some ranks after it had been summed.
        """
        told = torch.cat([self._said(present), self._squares.told(self._gradients.block_sums())])
        group = self._collectives.group
        job = self._queue.submit(lambda: group.tell(told, what="an agreement"), what="the norm")
        job.wait()
        rows: torch.Tensor = job.result
        count = len(self._records)
        agreed = self._present_somewhere(rows[:, :count].tolist())
        # other copies say the same
        sums = self._squares.sums(rows[list(group.sharers), count:])
        return {index: value for index, value in sums.items() if index in agreed}

    def _said(self, present: Sequence[ParamRecord]) -> torch.Tensor:
        here = {record.index for record in present}
        said = [_PRESENT if record.index in here else _NONE for record in self._records]
        for n, record in enumerate(self._records):
            if _is_withdrawn(record):
                said[n] = _WITHDRAWN
        return torch.tensor(said, dtype=torch.float64)

    def _present_somewhere(self, rows: Sequence[Sequence[float]]) -> set[int]:
        agreed = set()
        for record, said in zip(self._records, zip(*rows, strict=True), strict=True):
            if _PRESENT not in said:
                continue
            if _WITHDRAWN in said:
                raise GradientError(
                    f"p.grad of {record.label} was cleared on rank {said.index(_WITHDRAWN)} after "
                    "it had been summed over the ranks, and not on all of them",
                    hint="clear gradients on every rank, or on none",
                )
            agreed.add(record.index)
        return agreed

    def window_ended(self) -> None:
        """See `Departure`."""
        for unit in self._units:
            for part in unit.parts:
                part.sums.forget()
        for record in self._records:
            record.was_given = False
        self._unfinished.clear()

    def discard(self) -> None:
        """See `Departure`; waits for exchanges that other ranks take part in."""
        while self._running:
            _, job, _ = self._running.popleft()
            job.wait_issued()
        self._turns.clear()
        self.window_ended()

    def spread_weights(
        self, nans: NanSource, unit: Unit, changed: Sequence[ParamRecord], after: Sequence[Any]
    ) -> None:
        """Bring a unit's new weights to all ranks; they are pending until they are there."""

        def _gather() -> None:
            for part in unit.parts:
                self._collectives.gather(part.weights, part.own_weights, purpose=Purpose.WEIGHTS)

        job = self._queue.submit(_gather, what=f"the weights of {unit.name}", after=after)
        unit.await_weights(changed, [job], nans)


def _is_withdrawn(record: ParamRecord) -> bool:
    """Its gradient is in a sum over ranks, and `p.grad` says that it is gone."""
    return record.part.sums.is_spread and record.was_given and record.param.grad is None


def _part_blocks(units: Sequence[Unit]) -> Iterator[PartBlocks]:
    for unit in units:
        for number, part in enumerate(unit.parts):
            spans = {
                slot.index: (slot.offset // BLOCK, -(-slot.end // BLOCK))
                for slot in part.layout.slots
            }
            yield PartBlocks(key=(unit.index, number), each=part.own.elements // BLOCK, spans=spans)
