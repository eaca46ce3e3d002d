"""Residency: makes the weights of units that live elsewhere resident on the device, and lets go.

`plan.weight_pool` decides what comes and goes; this file carries it out: memory, arrival, and the
swap of `p.data`. Where the bytes come from is the source's business: a copy from the host, a
gather over ranks.

Calls: `hold` and `release` around a module's forward; `acquire` where backward or a reader uses a
unit; `renew` when stored weights have changed; `expect_forward` at the end of a step.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

import torch

from forebay.engine.away_reads import AwayReads
from forebay.engine.forward_cost import ForwardCost
from forebay.engine.masters import keep_written
from forebay.engine.one_pass import OnePass
from forebay.engine.unit import WeightState
from forebay.errors import RankError, TransferError
from forebay.links.observer import Moment
from forebay.plan.foresight import Pass
from forebay.plan.loads import Uses
from forebay.plan.weight_pool import MoveKind
from forebay.tiers.ledger import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from forebay.accelerators.base import Waitable
    from forebay.engine.barrier import Barrier
    from forebay.engine.record import ParamRecord
    from forebay.engine.unit import NanSource, Unit
    from forebay.links.lanes import Lanes
    from forebay.plan.weight_pool import Move, WeightPool
    from forebay.tiers.ledger import Reservation

__all__ = ["Residency", "WeightSource"]


class WeightSource(Protocol):
    """Fills the memory of a unit's weights on the device."""

    def bring(self, unit: Unit) -> Sequence[Waitable]:
        """Enqueue what fills a unit's homes, which have memory now.

        The memory may still be used by what is enqueued on the compute stream; whatever writes
        into it follows that stream's present end.

        Returns:
            Tickets; once all are done the weights are there.
        """
        ...

    def meet_readers(self) -> None:
        """Wait until no other rank needs this one for units that all ranks are reading."""

    def take_from_rank(self, param: torch.Tensor, *, rank: int) -> None:
        """Let a weight that is here have the values that it has on one rank; all ranks call it."""

    @property
    def looks_ahead(self) -> bool:
        """Whether units are brought before they are needed."""
        ...


class Residency:
    """Brings units' weights to the device and lets go of them.

    Args:
        units: Every unit by index; those whose weights are resident for good are ignored.
        pool: What decides.
        source: What fills memory.
        lanes: The device, and who is told of waits.
        nans: What parameters view while their weights are away.
        barrier: Closes the engine when a transfer failed, and refuses once it is closed.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        pool: WeightPool,
        source: WeightSource,
        lanes: Lanes,
        nans: NanSource,
        barrier: Barrier,
    ) -> None:
        self._units = units
        self.pool = pool
        self._source = source
        self._lanes = lanes
        self._nans = nans
        self._barrier = barrier
        self._coming: dict[int, Sequence[Waitable]] = {}
        self._node: tuple[int, int] | None = None
        self._cost = ForwardCost()
        # What follows the backward of forwards that share a pass belongs to it too.
        self.one_pass = OnePass()
        # Whether weights change before the next forward, as far as known.
        self.is_last_backward: Callable[[], bool] = _unknown
        # Takes bytes that the pool holds for a while beside its own; set by who made the pool.
        self.reserve: Callable[[int], Reservation] = _refuse_more
        streamed = [unit for unit in units if unit.streams_weights]
        self.away_reads = AwayReads(streamed, nans=nans)
        for unit in streamed:
            unit.leave(nans)

    @property
    def uses(self) -> Uses | None:
        """What the last forward and the last backward used; None before there was one of each."""
        recorded = self.pool.foresight.recorded
        return None if recorded is None else Uses(*recorded)

    def begin_forward(self) -> None:
        """A root forward begins."""
        if torch._C._current_graph_task_id() < 0 and self.one_pass.begins():
            trains = torch.is_grad_enabled()
            if trains:
                self.end_reading()
                if not self.one_pass.is_shared:
                    self.away_reads.begin()
            else:
                self._cost.begins(self.pool.brought_bytes)
            then = Pass.BACKWARD if trains else Pass.FORWARD
            self.pool.begin(Pass.FORWARD, then=then)

    def end_reading(self) -> None:
        """Evaluation or generation is over, if there was any."""
        self._cost.over(self.pool.brought_bytes)

    def hold(self, unit: Unit) -> None:
        """`acquire`, and keep the unit on the device until `release`."""
        self.acquire(unit)
        self.pool.hold(unit.index)

    def release(self, unit: Unit) -> None:
        """Undo one `hold`; the memory goes when others need it."""
        self.pool.release(unit.index)

    def read(self, unit: Unit) -> None:
        """`acquire`, and rather keep the unit until `forget`; it goes if a use needs its room."""
        self.acquire(unit)
        self.pool.read(unit.index)

    def forget(self, unit: Unit) -> None:
        """Undo one `read`."""
        self.pool.forget(unit.index)

    def acquire(self, unit: Unit) -> None:
        """A unit's weights are on the device, for what the caller enqueues next.

        Raises:
            BudgetError: Units that are in use at the same time leave no room.
            TransferError: The weights did not arrive; the engine is closed.
            PendingWeightError: Someone wrote into weights that were away.
        """
        self._note_pass()
        self._note_node()
        self._take_over_assigned(unit)
        unit.was_used = True
        is_new = self.pool.last != unit.index
        moves = self.pool.use(unit.index)
        self._bring(unit, moves)
        if is_new:
            self._lanes.mark(Moment.WEIGHTS_LATE if moves else Moment.WEIGHTS_IN_TIME, unit.name)
            self.look_ahead()

    def show(self, unit: Unit) -> None:
        """`acquire` outside of any pass: for a reader, without a trace in the order of uses."""
        self._take_over_assigned(unit)
        self._bring(unit, self.pool.require(unit.index))

    @contextlib.contextmanager
    def showing(self, unit: Unit) -> Iterator[None]:
        """`show`, and keep the unit inside a `with` block."""
        with self.room_for([unit.index]):
            self.show(unit)
            self.pool.hold(unit.index)
            try:
                yield
            finally:
                self.pool.release(unit.index)

    @contextlib.contextmanager
    def room_for(self, units: Iterable[int]) -> Iterator[None]:
        """Inside it, the pool has room for these units at once, beside what is held already.

        Raises:
            BudgetError: The device's budget has not; nothing has moved.
        """
        more = self.pool.lacking_bytes(units)
        if not more:
            yield
            return
        reservation = self.reserve(more)
        self.pool.grow(more)
        try:
            yield
        finally:
            moves = self.pool.shorten(more)
            if not self._barrier.is_closed:  # else nobody waits for what was on its way
                self._carry_out(moves)
            reservation.release()

    def _bring(self, unit: Unit, moves: Sequence[Move]) -> None:
        self._barrier.refuse_closed(f"unit {unit.name}")
        if Role.LP_PARAMS in self._barrier.away:
            self._barrier.refuse_away(f"weights of unit {unit.name}")
        try:
            self._carry_out(moves)
        except torch.OutOfMemoryError:
            # activations have grown into the pool's room: what came ahead makes way
            self._carry_out(self.pool.shed())
            self._carry_out(self.pool.require(unit.index))
        if unit.state is not WeightState.READY:
            self._await(unit)
            unit.arrive()
            self.away_reads.moved(unit)

    def _take_over_assigned(self, unit: Unit) -> None:
        """A tensor that the user put into `p.data` while the weight was away becomes the weight."""
        if unit.state is not WeightState.AWAY:
            return
        assigned = [
            record
            for record in unit.records
            if record.away is not None
            and record.slot.elements
            and record.param.data_ptr() != record.away.data_ptr()
        ]
        for record in assigned:
            keep_written(record)
        if assigned:
            self.drop_all([unit])

    def expect_forward(self) -> None:
        """New weights are made: bring up what the next forward needs first."""
        self._node = None
        self.pool.unguard()
        self.pool.foresight.expect(Pass.FORWARD)
        self.look_ahead()

    def look_ahead(self) -> None:
        """Bring up what is needed next, as far as there is room."""
        if not self._source.looks_ahead:
            return
        try:
            self._carry_out(self.pool.ahead())
        except torch.OutOfMemoryError:
            # Looking ahead is no need; asking in vain each time would flush the allocator's cache.
            self.pool.shrink()

    def renew(self, unit: Unit, records: Sequence[ParamRecord]) -> None:
        """The stored weights of some parameters have changed or are about to: drop the copy."""
        self._carry_out(self.pool.drop(unit.index))
        unit.was_used = False
        unit.mark_changed(records)

    def drop_all(self, units: Iterable[Unit] | None = None) -> None:
        """Let go of every unit (or of some), whoever needs it next; takes over users' writes."""
        for unit in self._units if units is None else units:
            self._carry_out(self.pool.drop(unit.index))

    def _note_pass(self) -> None:
        """Passes begin at the root; this finds those that do not."""
        in_backward = torch._C._current_graph_task_id() >= 0
        kind = Pass.BACKWARD if in_backward else Pass.FORWARD
        if kind is not self.pool.foresight.kind:
            if in_backward:
                then = None if self.is_last_backward() else Pass.FORWARD
                self.pool.begin(kind, then=then)
            elif not self.one_pass.has_begun:
                self.begin_forward()

    def _note_node(self) -> None:
        """What the last node of a backward asked for may go once another one runs."""
        running = torch._C._current_autograd_node()
        # By numbers: a node that is kept after a backward that failed keeps its graph, whose hooks
        # keep this engine, in a circle that no collector of garbage sees.
        node = None
        if running is not None:
            node = torch._C._current_graph_task_id(), running._sequence_nr()
        if node != self._node:
            self._node = node
            self.pool.unguard()

    def meet_readers(self) -> None:
        """Every reader of all weights has them: go on when the other ranks' have too."""
        self._source.meet_readers()

    def take_from_rank(self, param: torch.Tensor, *, rank: int) -> None:
        """See `WeightSource`."""
        self._source.take_from_rank(param, rank=rank)

    def use_in_node(self, unit: Unit) -> None:
        """`acquire` for the autograd node that runs; it keeps all units that it asks for."""
        self.acquire(unit)
        self.pool.guard(unit.index)

    def _carry_out(self, moves: Sequence[Move]) -> None:
        for done, move in enumerate(moves):
            try:
                if move.kind is MoveKind.LOAD:
                    self._load(self._units[move.unit])
                else:
                    self._drop(self._units[move.unit])
            except BaseException:  # the device may be out of memory: nothing has changed then
                self.pool.undo(moves[done:])
                raise

    def _load(self, unit: Unit) -> None:
        try:
            for part in unit.parts:
                if part.home is not None:
                    part.home.fill()
            self._coming[unit.index] = self._source.bring(unit)
        except BaseException:
            _empty(unit)
            raise

    def _drop(self, unit: Unit) -> None:
        if unit.state is WeightState.READY:
            for record in unit.records:
                keep_written(record)  # what the user wrote into the weights must not be lost
        # a load that nobody waited for still writes into the memory
        self._await(unit)
        unit.leave(self._nans)
        self.away_reads.moved(unit)
        _empty(unit)

    def _await(self, unit: Unit) -> None:
        tickets = self._coming.pop(unit.index, ())
        if not tickets:
            return
        try:
            with self._lanes.waiting(f"weights of {unit.name}"):
                for ticket in tickets:
                    self._lanes.accelerator.wait_for(ticket)
        except RankError as error:
            self._barrier.fail(str(error))
            raise
        except RuntimeError as error:
            self._barrier.fail(str(error))
            raise TransferError(
                f"weights of unit {unit.name} did not arrive: {error}",
                hint="go back to the last checkpoint",
            ) from error


def _empty(unit: Unit) -> None:
    for part in unit.parts:
        if part.home is not None:
            part.home.empty()


def _unknown() -> bool:
    return False


def _refuse_more(nbytes: int) -> Reservation:
    raise AssertionError(f"nobody said where {nbytes} bytes more are to be reserved")
