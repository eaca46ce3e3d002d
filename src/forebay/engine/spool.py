"""State in files on its way through the update: read, update, publish and write back, by pieces.

A step enqueues everything at once; native queues carry it out, each link of a piece's chain after
the ticket of the one before:

    read (its buffer is free) -> update (the gradient has landed) -> publish the new weights
                                                                  -> write back -> buffer is free

Where weights are in files too, they are summed and written instead of published; those of delayed
updates stay over the gradient until the next step.

[Note: what stays] The first pieces of the model stay in memory, as many as the placement holds:
they are neither read nor written, and whoever else needs one waits for its last update
(`FileState`). Through the buffers the others come and go; these end a step with its last ones.
Read-ahead during the next backward needs no clip factor; it fills them with the pieces that the
coming step begins with, and leaves those among them that are here already. The file is the truth of
such a piece once the barrier was passed: a buffer is a copy of it, and whoever writes state
otherwise makes the buffer forget it first.
"""

from __future__ import annotations

import contextlib
from itertools import islice
from typing import TYPE_CHECKING, Any

from forebay.engine.gradients import before_update
from forebay.engine.piece_job import NewWeights, jobs_of
from forebay.engine.weight_spool import WeightPiece
from forebay.links.lanes import PIECE_BYTES
from forebay.optim.flat_state import native_hypers
from forebay.plan.memory import buffer_bytes
from forebay.plan.placement import UpdatePlace
from forebay.plan.program import Lane, OpKind
from forebay.tiers.host import HostArena
from forebay.tiers.ledger import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from forebay.engine.file_state import FileState
    from forebay.engine.part import PartStorage
    from forebay.engine.piece_job import PieceJob
    from forebay.engine.publisher import Publisher
    from forebay.engine.state_memory import PartMemory
    from forebay.engine.terms import UpdateOrder
    from forebay.engine.unit import Unit
    from forebay.links.lanes import Lanes
    from forebay.plan.placement import Placement

__all__ = ["Spool"]


class _Buffer:
    """Memory for one record and the new weights behind it.

    Attributes:
        address: Where.
        holds: (state, index) of the record that is in it or on its way; None when empty.
        arrival: The read that brings it, or the update that left it there.
        users: What must have ended before it is filled with another.
        is_wanted: Read ahead for the coming step, which has not used it yet.
    """

    def __init__(self, address: int) -> None:
        self.address = address
        self.holds: tuple[FileState, int] | None = None
        self.arrival: Any = None
        self.users: list[Any] = []
        self.is_wanted = False

    @property
    def pending(self) -> list[Any]:
        """What may still use what is in it."""
        return self.users if self.arrival is None else [*self.users, self.arrival]


class Spool:
    """Buffers, and the chains of work that go through them.

    Args:
        lanes: The update pool and the link to the device.
        placement: How many buffers, and how they are used.
        memory: Files, ledger and page-locking policy.
        publisher: Takes new weights.
    """

    def __init__(
        self,
        lanes: Lanes,
        *,
        placement: Placement,
        memory: PartMemory,
        publisher: Publisher,
    ) -> None:
        assert memory.files is not None
        self._lanes = lanes
        self._link = memory.files.link
        self._lock = memory.files.lock
        self._plan = placement.buffers
        self._publisher = publisher
        self._traffic = lanes.traffic
        size = buffer_bytes(placement)
        self._arena = HostArena(
            size * self._plan.count,
            ledger=memory.ledger,
            role=Role.STAGING,
            what="state between files and updates",
            page_locking=memory.page_locking,
        )
        # In the order in which they were used last, oldest first.
        self._buffers = [_Buffer(self._arena.address + i * size) for i in range(self._plan.count)]
        self._held: dict[tuple[FileState, int], _Buffer] = {}
        self._last_update: Any = None
        self._last_write: Any = None

    def adopt(self, units: Iterable[Unit]) -> None:
        """Let writers of these units' state tell the buffers."""
        for _, part, index in _pieces(units):
            state = part.files
            assert state is not None
            state.before_write = self._forget
            if index < state.held:
                self._held[state, index] = buffer = _Buffer(state.held_address(index))
                buffer.holds = state, index

    def read_ahead(self, units: Iterable[Unit]) -> None:
        """Fill buffers with what the coming step begins with, in the order of these units."""
        if not self._plan.reads_ahead:
            return
        coming = (
            (unit, part.files, index)
            for unit, part, index in _pieces(units)
            if part.files is not None and index >= part.files.held
        )
        first = list(islice(coming, self._plan.count))
        wanted = [(state, index) for _, state, index in first]
        for buffer in self._buffers:
            buffer.is_wanted = buffer.holds in wanted
        for unit, state, index in first:
            if self._holder(state, index) is None:
                self._lanes.observer.doing(OpKind.READ, unit.name)
                self._fill(state, index).is_wanted = True

    def update(self, unit: Unit, order: UpdateOrder) -> None:
        """Enqueue all of a unit's update; its weights are pending from now on."""
        event = self._lanes.accelerator.record_event()
        arrivals: list[Any] = []

        def _leave(job: PieceJob, update: Any) -> list[Any]:
            if job.part.weight_files is not None:
                return [self._write_weights(job.part.weight_files, job, update)]
            if unit.stores_off_device:
                return []
            arrivals.append(self._publish(unit, job, [update], event.handle))
            return arrivals[-1:]

        self._update(unit, order, where=NewWeights.APART, leave=_leave)
        changed = [record for record in unit.records if record.index in order.hyper_of]
        if unit.stores_off_device:
            self._publisher.written_back(unit, order.hyper_of, [part.ticket for part in unit.parts])
        elif changed:
            self._lanes.hold(self._lanes.join(arrivals), event)
            self._publisher.await_arrivals(unit, changed, arrivals)

    def update_behind(self, unit: Unit, order: UpdateOrder) -> list[Any]:
        """As `update`; new weights lie over the gradient they came from until `publish`.

        Returns:
            The ticket of each part's update; None where it has none.
        """

        def _stay(job: PieceJob, update: Any) -> list[Any]:
            del job, update
            return []

        return self._update(unit, order, where=NewWeights.OVER_GRADIENT, leave=_stay)

    def publish(self, unit: Unit, updates: Sequence[Any], order: UpdateOrder) -> None:
        """Send up what `update_behind` has made, of parameters that are still in the order."""
        event = self._lanes.accelerator.record_event()
        arrivals: list[Any] = []
        for part, records, update in zip(unit.parts, unit.records_of_part, updates, strict=True):
            if update is None or part.files is None:
                continue
            jobs = jobs_of(part, records, order, where=NewWeights.OVER_GRADIENT)
            sent = [self._publish(unit, job, [update], event.handle) for job in jobs]
            if sent:
                part.ticket = self._lanes.hold(self._lanes.join([update, *sent]), event)
                arrivals += sent
        changed = [record for record in unit.records if record.index in order.hyper_of]
        self._publisher.await_arrivals(unit, changed, arrivals)

    def _update(
        self,
        unit: Unit,
        order: UpdateOrder,
        *,
        where: NewWeights,
        leave: Callable[[PieceJob, Any], list[Any]],
    ) -> list[Any]:
        """Update a unit's pieces and write them; `leave` says what else a buffer waits for."""
        numbers = native_hypers(self._lanes.core, order.hypers)
        tickets: list[Any] = []
        for part, records in zip(unit.parts, unit.records_of_part, strict=True):
            tickets.append(None)
            if not any(record.index in order.hyper_of for record in records):
                continue
            part.await_readers()
            updates = []
            for job in jobs_of(part, records, order, where=where):
                with self._lock:  # whoever reads it now has read it, or waits for all of this
                    updates.append(self._advance(unit, job, numbers, order.scale))
                    leaves = leave(job, updates[-1])
                    if job.index >= job.state.held:
                        leaves = [self._write(unit, job, updates[-1]), *leaves]
                    self._leave(job, updates[-1], leaves)
            if updates:
                tickets[-1] = part.ticket = self._lanes.hold(self._lanes.join(updates))
        return tickets

    def close(self) -> None:
        """Give the memory back; the lanes are closed. Idempotent."""
        self._buffers.clear()
        self._held.clear()
        self._arena.close()

    def _advance(self, unit: Unit, job: PieceJob, numbers: list[Any], scale: float) -> Any:
        """Bring a piece, unless it is here, and update it."""
        lanes, state = self._lanes, job.state
        buffer = self._holder(state, job.index)
        if buffer is None:
            lanes.observer.doing(OpKind.READ, unit.name)
            buffer = self._fill(state, job.index)
        if job.index >= state.held:
            self._buffers.remove(buffer)
            self._buffers.append(buffer)
            buffer.is_wanted = False
        job.buffer = buffer.address
        lanes.observer.doing(OpKind.UPDATE, unit.name)
        after = [*buffer.pending, *before_update(job.part)]
        if job.part.weight_files is not None and not job.is_whole:
            after += self._read_weights(job.part.weight_files, job, buffer)
        native = job.native(lanes.core)
        ticket = lanes.update(
            *(native, numbers, job.chosen, scale, max(1, job.record.elements), None, after),
            *(state.sums_address(job.index), job.names),
        )
        self._last_update = lanes.hold(ticket, native)
        return ticket

    def _publish(self, unit: Unit, job: PieceJob, after: Sequence[Any], event: int) -> Any:
        self._lanes.observer.doing(OpKind.PUBLISH, unit.name)
        plan = self._lanes.core.CopyPlan(PIECE_BYTES)
        item = job.part.dtype.itemsize
        target = job.part.own_weights.data_ptr() + job.record.begin * item
        for (offset, elements), hyper in zip(job.segments, job.chosen, strict=True):
            if hyper >= 0:
                plan.append(
                    target + offset * item, job.new_weights + offset * item, elements * item
                )
        self._traffic[Lane.UP] += plan.nbytes
        return self._lanes.publish_behind(after, plan, event=event)

    def _read_weights(self, state: FileState, job: PieceJob, buffer: _Buffer) -> list[Any]:
        """Bring a piece's old weights behind its record: not all of them become new."""
        if job.new_weights == job.buffer:  # fp32: the master is the weight
            return []
        written = state.written[job.index]
        # With the arrival: until then the piece before it, which may be longer, is in the buffer.
        after = buffer.pending if written is None else [*buffer.pending, written]
        piece = WeightPiece.whole(state, job.index)
        span = piece.span(job.new_weights)
        read = self._lanes.hold(self._link.read(span, after=after))
        self._lanes.observer.submitted(Lane.READ, read, span[2])
        self._traffic[Lane.READ] += span[2]
        return [piece.sums(self._lanes, "compare", at=job.new_weights, after=[read])]

    def _write_weights(self, state: FileState, job: PieceJob, update: Any) -> Any:
        """Sum a piece's new weights and write them to their file."""
        piece = WeightPiece.whole(state, job.index)
        summed = piece.sums(self._lanes, "store", at=job.new_weights, after=[update])
        span = piece.span(job.new_weights)
        ticket = self._lanes.hold(self._link.write(span, after=[summed]))
        self._lanes.observer.submitted(Lane.WRITE, ticket, span[2])
        self._traffic[Lane.WRITE] += span[2]
        state.written[job.index] = ticket
        return ticket

    def _write(self, unit: Unit, job: PieceJob, update: Any) -> Any:
        self._lanes.observer.doing(OpKind.STORE, unit.name)
        state, record = job.state, job.record
        span = (state.offset(job.index), job.buffer, record.nbytes)
        ticket = self._lanes.hold(self._link.write(span, after=[update]))
        self._lanes.observer.submitted(Lane.WRITE, ticket, record.nbytes)
        self._traffic[Lane.WRITE] += record.nbytes
        state.written[job.index] = self._last_write = ticket
        return ticket

    def _leave(self, job: PieceJob, update: Any, users: list[Any]) -> None:
        """A buffer holds its piece as the update leaves it, and is free once its users are done."""
        buffer = self._holder(job.state, job.index)
        assert buffer is not None
        if job.index < job.state.held:
            job.state.written[job.index] = update
        buffer.arrival, buffer.users = update, users

    def _holder(self, state: FileState, index: int) -> _Buffer | None:
        if index < state.held:
            return self._held[state, index]
        return next((b for b in self._buffers if b.holds == (state, index)), None)

    def _fill(self, state: FileState, index: int) -> _Buffer:
        """Enqueue the read of a record into the buffer that can best be spared."""
        buffer = next((b for b in self._buffers if not b.is_wanted), self._buffers[-1])
        after = list(buffer.pending)  # one that was never used may still be read
        if state.written[index] is not None:
            after.append(state.written[index])
        if not self._plan.reads_ahead and self._last_update is not None:
            after.append(self._last_update)
        if not self._plan.writes_behind and self._last_write is not None:
            after.append(self._last_write)
        record = state.records[index]
        span = (state.offset(index), buffer.address, record.nbytes)
        ticket = self._lanes.hold(self._link.read(span, after=after))
        self._lanes.observer.submitted(Lane.READ, ticket, record.nbytes)
        self._traffic[Lane.READ] += record.nbytes
        buffer.holds, buffer.arrival, buffer.users = (state, index), ticket, []
        return buffer

    def _forget(self, state: FileState, index: int) -> None:
        """The record is about to be written by somebody else."""
        buffer = self._holder(state, index)
        if buffer is not None:
            for ticket in buffer.pending:
                with contextlib.suppress(RuntimeError):  # surfaces where it is waited for
                    ticket.wait()
            if index >= state.held:
                buffer.holds, buffer.is_wanted = None, False


def _pieces(units: Iterable[Unit]) -> Iterator[tuple[Unit, PartStorage, int]]:
    for unit in units:
        if unit.placement.update is UpdatePlace.NVME:
            for part in unit.parts:
                if part.files is not None:
                    for index in range(len(part.files.records)):
                        yield unit, part, index
