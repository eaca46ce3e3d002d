"""State that leaves the device for a while, between phases of a program, and comes back.

Whole roles move: moments, masters, weights, gradients. Bytes travel through the engine's lanes
into host buffers that are kept, so that the second time nothing is allocated or page-locked; the
device's memory goes back to its driver. It moves bytes and refuses who needs them meanwhile; what
they mean is the parts' business.

[Note: batches] The driver takes about a tenth of a copy's time to take memory back or to give it
out again. Bytes therefore travel in batches: one batch's memory changes hands while another's
bytes are on the link.

Over several ranks every rank calls for the same moves, and all of them move or none.
"""

from __future__ import annotations

import contextlib
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from forebay.comm.together import Together
from forebay.engine.moved_gradients import gradient_places
from forebay.engine.unit import WeightState
from forebay.errors import BudgetError, TransferError
from forebay.links.lanes import wait
from forebay.tiers.host import HostArena
from forebay.tiers.ledger import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

    from forebay.engine.collector import Collector
    from forebay.engine.moved_gradients import GradientPlace
    from forebay.engine.policy import PolicyParts
    from forebay.engine.record import ParamRecord
    from forebay.engine.residency import Residency
    from forebay.tiers.device import DeviceArena

__all__ = ["MOVABLE", "HostPages", "MoveTiming", "StateMoves"]

# What may be asked for.
MOVABLE = (
    Role.OPTIM_STATES,
    Role.HP_PARAMS,
    Role.LP_PARAMS,
    Role.LP_GRADS,
    Role.CONTIGUOUS_GRAD_BUFFER,
)


# A batch ends with the tensor that fills it; see [Note: batches].
_BATCH_BYTES = 1 << 30

# (destination, source, bytes), and the device's memory.
_Going: TypeAlias = tuple[tuple[int, int, int], torch.Tensor]
_Pair: TypeAlias = "tuple[DeviceArena, HostArena]"
_MovingGradient: TypeAlias = "tuple[GradientPlace, torch.Tensor, HostArena]"


class HostPages(Enum):
    """What the host's buffers are."""

    LOCKED = "locked"
    """Page-locked, where the device has a link: copies go at its speed."""
    PAGEABLE = "pageable"


class MoveTiming(Enum):
    """Whether a move is over when its call returns."""

    WAIT = "wait"
    ENQUEUE = "enqueue"
    """Copies are on their way; memory is free after `synchronize`."""


class StateMoves:
    """Moves an engine's state off its device and back.

    Args:
        parts: Units, lanes, memory, and the barrier, which refuses who needs what is away.
        collector: Knows sums over ranks that are on their way, and the policy's own memory.
        residency: Holds copies of weights that live elsewhere.
        settle: Makes masters and weights agree before anything leaves.
    """

    def __init__(
        self,
        parts: PolicyParts,
        *,
        collector: Collector,
        residency: Residency,
        settle: Callable[[], None],
    ) -> None:
        self._units = parts.units
        self._lanes = parts.executor.lanes
        self._memory = parts.memory
        self._barrier = parts.barrier
        self._collector = collector
        self._policy = collector.policy
        self._residency = residency
        self._settle = settle
        group = parts.options.group
        self._together = Together.of(group, "moves of state", otherwise=BudgetError)
        self._buffers: dict[Hashable, HostArena] = {}
        self._arenas: list[tuple[DeviceArena, HostArena]] = []
        # Memory of the policy that was given back with nothing in it.
        self._idle: list[DeviceArena] = []
        self._gradients: list[tuple[GradientPlace, torch.Tensor, torch.device]] = []
        # Copies off the device that may still run: what comes back follows them.
        self._leaving: list[Any] = []
        # Copies to the device and their bytes, and gradients' memory there, until all have room.
        self._coming: list[tuple[Any, int]] = []
        self._returned: list[tuple[GradientPlace, torch.Tensor]] = []
        self._to_trim = False

    def offload(
        self, roles: Collection[Role], *, pages: HostPages, timing: MoveTiming = MoveTiming.WAIT
    ) -> int:
        """Bring roles to host memory and give their device memory back; returns the bytes.

        What is away already stays there. Until `reload`, `step()` and readers raise, and so do
        forwards where the weights are away.

        Args:
            roles: Of `MOVABLE`.
            pages: What the host's buffers are.
            timing: Whether to wait for the copies.

        Raises:
            BudgetError: The host budget (of one of the ranks) does not hold the bytes; nothing has
                moved.
            GradientError: Units were updated during backward, and `step()` was not called yet.
            RankError: A rank is gone, has not come, or asks for other roles (nothing has moved).
        """
        self._barrier.refuse_closed("offload_states()")
        self._together.arrive(what="offload_states()")
        self._together.agree(", ".join(sorted(r.value for r in roles)), what="offload_states()")
        self._collector.departure.settle(self._collector.program)
        if self._barrier.away:
            self._barrier.drain("offload_states()")
        else:
            self._settle()
        if Role.LP_PARAMS in roles:
            # whole copies are made from what leaves: those on their way come first
            self._residency.drop_all()
        arenas = self._arenas_of(roles)
        away = {id(tensor) for _, tensor, _ in self._gradients}
        places = [p for p in gradient_places(self._units) if p.role in roles]
        places = [place for place in places if id(place.get()) not in away]
        with self._all_or_none():
            pairs, grads = self._together.run(
                partial(self._reserve, arenas, places, pages), what="offload_states()"
            )
        moved = self._leave(pairs, grads)
        del grads  # else their memory would still be in use when it is given back
        self._vacate([a for a in self._policy.idle_arenas() if a.role in roles and a.flat.numel()])
        self._rebind()
        if timing is MoveTiming.WAIT:
            self.finish()
        return moved

    def _arenas_of(self, roles: Collection[Role]) -> list[DeviceArena]:
        """Those that are here, once nobody reads them: a checkpoint may be written meanwhile."""
        found = []
        for part in (part for unit in self._units for part in unit.parts):
            arenas = [a for a in part.device_arenas if a.role in roles and a.flat.numel()]
            if arenas:
                part.await_readers()
            found += arenas
        return found

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Buffers that were made in here stay only if every rank has its own."""
        known = set(self._buffers)
        try:
            yield
        except BaseException:
            for key in self._buffers.keys() - known:
                self._buffers.pop(key).close()
            raise

    def _reserve(
        self, arenas: Sequence[DeviceArena], places: Sequence[GradientPlace], pages: HostPages
    ) -> tuple[list[_Pair], list[_MovingGradient]]:
        """Room on the host for what is to leave."""
        pairs = [(arena, self._buffer(arena, arena.nbytes, arena.role, pages)) for arena in arenas]
        grads = []
        for number, place in enumerate(places):
            value = place.get()
            assert value is not None
            key = (place.role, number)
            grads.append((place, value, self._buffer(key, value.nbytes, place.role, pages)))
        return pairs, grads

    def _leave(self, pairs: Sequence[_Pair], grads: Sequence[_MovingGradient]) -> int:
        if not (pairs or grads):
            return 0
        event = self._lanes.accelerator.record_event()
        going: list[_Going] = [
            ((buffer.address, arena.flat.data_ptr(), arena.nbytes), arena.vacate())
            for arena, buffer in pairs
        ]
        for place, value, buffer in grads:
            there = buffer.tensor(value.dtype, offset_bytes=0, elements=value.numel())
            there = there.view(value.shape)
            place.put(there)
            self._gradients.append((place, there, value.device))
            going.append(((buffer.address, value.data_ptr(), value.nbytes), value))
        moved = 0
        for batch in _batches(going):
            spans = [span for span, _ in batch]
            ticket, nbytes = self._lanes.land(spans, event=event.handle, after=[])
            moved += nbytes
            self._leaving.append(self._lanes.hold(ticket, [kept for _, kept in batch], event))
        self._arenas += pairs
        self._barrier.away |= {arena.role for arena, _ in pairs} | {p.role for p, *_ in grads}
        self._to_trim = True
        return moved

    def _vacate(self, arenas: Sequence[DeviceArena]) -> None:
        """Memory in which there is nothing: it needs no copy."""
        for arena in arenas:
            arena.vacate()
            self._barrier.away.add(arena.role)
        self._idle += arenas
        self._to_trim = self._to_trim or bool(arenas)

    def reload(self, *, timing: MoveTiming = MoveTiming.WAIT) -> int:
        """Bring everything back, the same bits; returns the bytes. Nothing away is legal.

        Raises:
            BudgetError: The device (of one of the ranks) has no room; everything stays on the host.
            OutOfMemoryError: As above, by torch.
            TransferError: The copy failed; the engine is closed.
        """
        self._barrier.refuse_closed("reload_states()")
        self._occupy(partial(self._together.run, what="reload_states()"))
        if not self._barrier.away:
            return 0  # weights may be on their way from the last step: nobody may show them yet
        return self._arrive(timing)

    def _occupy(self, run: Callable[[Callable[[], None]], None]) -> None:
        """Take device memory for all that is away, or for nothing, and let the bytes come.

        Nothing is forgotten here: what the host holds is whole until `_arrive`.
        """
        try:
            run(self._come)
        except BaseException:
            for ticket, _ in self._coming:
                with contextlib.suppress(RuntimeError):
                    ticket.wait()
            for arena in (*(arena for arena, _ in self._arenas), *self._idle):
                arena.vacate()
            self._coming.clear()
            self._returned.clear()
            self._lanes.reap()
            raise

    def _come(self) -> None:
        """Every batch's copy begins as soon as it has memory; see [Note: batches]."""
        for arena in self._idle:
            arena.occupy()
        for batch in _batches(self._with_room()):
            # The allocator may hand out memory that enqueued kernels still use: the copies wait.
            event = self._lanes.accelerator.record_event()
            spans = [span for span, _ in batch]
            ticket = self._lanes.fetch(spans, event=event.handle, after=self._leaving)
            self._coming.append((ticket, _nbytes(batch)))
            self._lanes.hold(ticket, [kept for _, kept in batch], event)

    def _with_room(self) -> Iterator[_Going]:
        """What is away, one after the other, as each has taken its memory."""
        for arena, buffer in self._arenas:
            arena.occupy()
            yield (arena.flat.data_ptr(), buffer.address, arena.nbytes), arena.flat
        for place, there, device in self._gradients:
            if place.get() is there:  # else it was discarded meanwhile
                here = torch.empty_like(there, device=device)
                self._returned.append((place, here))
                yield (here.data_ptr(), there.data_ptr(), there.nbytes), here

    def _arrive(self, timing: MoveTiming) -> int:
        """All that was away is here, or on its way."""
        for place, here in self._returned:
            place.put(here)
        coming, self._coming = self._coming, []
        for kept in (self._returned, self._arenas, self._idle, self._gradients, self._leaving):
            kept.clear()
        self._barrier.away.clear()
        self._rebind()
        if timing is MoveTiming.WAIT:
            self.finish()
        else:
            for ticket, _ in coming:
                self._lanes.accelerator.wait_for(ticket)
        return sum(nbytes for _, nbytes in coming)

    def finish(self) -> None:
        """Wait for moves that are on their way, and give device memory that left to its driver.

        Raises:
            TransferError: A copy failed; the engine is closed.
        """
        self._barrier.refuse_closed("a move of state")
        if self._to_trim:
            for ticket in self._leaving:
                self._give_back(ticket)
        self._barrier.drain("a move of state")
        if self._to_trim:
            self._to_trim = False
            self._lanes.accelerator.trim()

    def _give_back(self, ticket: Any) -> None:
        """One batch's memory to the driver, while later ones are on the link."""
        try:
            wait(ticket, "a move of state")
        except TransferError as error:
            self._barrier.fail(str(error))
            raise
        self._lanes.reap()
        self._lanes.accelerator.trim()

    def refuse_gradient(self, record: ParamRecord) -> None:
        """Raise StateAwayError when a gradient comes while others of its window are away.

        Or the weight itself: backward would read it, or has read what stands for it.
        """
        is_hidden = self._units[record.unit].state is WeightState.PENDING
        if self._gradients or (is_hidden and Role.LP_PARAMS in self._barrier.away):
            self._barrier.refuse_away("backward")

    def bring_home(self) -> None:
        """The engine is about to close: the model keeps its weights on the device.

        Ranks do not ask each other: some may be gone.
        """
        if self._barrier.away and not self._barrier.is_closed:
            self._occupy(lambda come: come())
            self._arrive(MoveTiming.WAIT)

    def close(self) -> None:
        """Give the buffers back."""
        self._arenas.clear()
        self._idle.clear()
        self._gradients.clear()
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()

    def _buffer(self, key: Hashable, nbytes: int, role: Role, pages: HostPages) -> HostArena:
        """The buffer of this key, kept from the last time where it is large enough."""
        known = self._buffers.get(key)
        if known is not None and known.nbytes < nbytes:
            self._buffers.pop(key).close()
            known = None
        if known is None:
            what = f"{role.value} that left the device"
            known = HostArena(nbytes, ledger=self._memory.ledger, role=role, what=what)
            self._buffers[key] = known
        if pages is HostPages.LOCKED and not known.is_locking:
            known.lock(self._memory.page_locking, nbytes=known.nbytes)
        return known

    def _rebind(self) -> None:
        """Let parts, parameters and the policy see the memory that there is."""
        self._policy.rebind()
        weights_away = Role.LP_PARAMS in self._barrier.away
        for unit in self._units:
            for part in unit.parts:
                part.rebind()
            if unit.streams_weights:
                continue
            if weights_away:
                unit.hide(self._barrier.nans)
            else:
                unit.show(self._barrier.nans)


def _nbytes(batch: Sequence[_Going]) -> int:
    return sum(span[2] for span, _ in batch)


def _batches(going: Iterable[_Going]) -> Iterator[list[_Going]]:
    """In their order; see [Note: batches]."""
    batch: list[_Going] = []
    for one in going:
        batch.append(one)
        if _nbytes(batch) >= _BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch
