"""State that visits the device: up during backward, updated there, back during the next forward.

Uploads need no clip factor, so they start while backward still runs, in whatever device memory
the activations have left free. A unit for which there is no room is updated on the host instead,
with the same bits. This file moves state; gradients and weights are the executor's.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from forebay.engine.gradients import follow
from forebay.engine.masters import refresh_master
from forebay.engine.record import GradientState
from forebay.engine.room import NO_HOLE
from forebay.model.layout import SUM_ITEM_BYTES
from forebay.optim.flat_state import FlatState
from forebay.plan.placement import MasterLayout
from forebay.plan.program import OpKind
from forebay.tiers.ledger import Role, Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from forebay.accelerators.base import Accelerator, Event
    from forebay.engine.part import PartStorage
    from forebay.engine.record import ParamRecord
    from forebay.engine.room import DeviceRoom, Hole
    from forebay.engine.unit import Unit
    from forebay.links.lanes import Lanes
    from forebay.tiers.ledger import Ledger

__all__ = ["StagedPart", "Streamer"]


class StagedPart:
    """One part's state on the device, for one step.

    Attributes:
        block: The memory; everything else views it.
        exp_avg: fp32 first moment.
        exp_avg_sq: fp32 second moment.
        low: int16 low half (split masters).
        master: fp32 master (whole masters of 16-bit weights).
        weights: The working weights, where they live on the host.
        ticket: The upload.
    """

    def __init__(self, part: PartStorage, block: torch.Tensor) -> None:
        n = part.elements
        self.block = block
        self.ticket: Any = None
        self.exp_avg = block[: 4 * n].view(torch.float32)
        self.exp_avg_sq = block[4 * n : 8 * n].view(torch.float32)
        self.low = block[8 * n : 10 * n].view(torch.int16) if part.low is not None else None
        whole = part.master is MasterLayout.WHOLE
        self.master = block[8 * n : 12 * n].view(torch.float32) if whole else None
        own = block[len(block) - n * part.dtype.itemsize :]
        self.weights = own.view(part.dtype) if part.stores_on_host else None

    def state_pairs(self, part: PartStorage) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(host, device) tensors of each role of the state."""
        pairs = [(part.exp_avg, self.exp_avg), (part.exp_avg_sq, self.exp_avg_sq)]
        if self.low is not None and part.low is not None:
            pairs.append((part.low, self.low))
        if self.master is not None:
            pairs.append((part.high, self.master))
        return pairs

    def weight_pairs(self, part: PartStorage) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Those of the weights: none where they live on the device."""
        return [] if self.weights is None else [(part.weights, self.weights)]

    def state(self, part: PartStorage) -> FlatState:
        """What the device updates: staged moments and master, the weights in place."""
        whole = self.master is not None
        weights = part.own_weights if self.weights is None else self.weights
        return FlatState(
            high=weights if self.master is None else self.master,
            low=self.low,
            exp_avg=self.exp_avg,
            exp_avg_sq=self.exp_avg_sq,
            out=weights if whole else None,
            segments=part.update_segments,
        )


class Streamer:
    """Brings state up while there is room, and back after its update.

    Args:
        lanes: The link.
        accelerator: The device.
        ledger: Where staging is counted.
        room: How much staging may be taken now.
    """

    def __init__(
        self, *, lanes: Lanes, accelerator: Accelerator, ledger: Ledger, room: DeviceRoom
    ) -> None:
        self._lanes = lanes
        self._accelerator = accelerator
        self._ledger = ledger
        self._room = room
        self._waiting: deque[Unit] = deque()
        self._staged: list[Unit] = []
        self._leaving: deque[Any] = deque()

    def begin(self, units: Iterable[Unit]) -> None:
        """A window's last backward begins: these units' state may come up, in this order."""
        self._waiting = deque(unit for unit in units if unit.staging is None)

    def pump(self) -> int:
        """Bring up what fits now; returns the bytes enqueued."""
        if self._next() is None:
            return 0
        moved, room, holes = 0, self._room.free_bytes() - self._promised_bytes(), None
        while (unit := self._next()) is not None:
            if room < _state_bytes(unit) + _gradient_bytes(unit):
                break
            # what the allocator has is looked through only when there is room at all
            holes = self._room.holes() if holes is None else holes
            batch, taken, hole = [], 0, holes.pop(0) if holes else NO_HOLE
            while unit is not None:
                state, gradient = _state_bytes(unit), _gradient_bytes(unit)
                if taken + state > hole.nbytes or room < state + gradient:
                    break
                batch.append(unit)
                taken, room = taken + state, room - state - gradient
                self._waiting.popleft()
                unit = self._next()
            if not batch:
                break
            self._fetch(batch, self._block(taken, hole=hole, units=len(batch)))
            moved += taken
        return moved

    def _next(self) -> Unit | None:
        """The first waiting unit whose update can still be on the device."""
        while self._waiting:
            unit = self._waiting[0]
            if not (unit.departed or any(_has_landed_for_good(r) for r in unit.records)):
                return unit
            self._waiting.popleft()
        return None

    def _promised_bytes(self) -> int:
        """Gradients still to come of units whose state is here: they will stay on the device."""
        return sum(_gradient_bytes(unit) for unit in self._staged if not unit.departed)

    def _fetch(self, units: Sequence[Unit], block: torch.Tensor) -> None:
        """Bring units up into `block`.

        One block for all that fits a hole: it takes the place of the activations that were there,
        and leaves it whole. Blocks of units between activations would scatter both.
        """
        # The allocator may hand out memory that enqueued kernels still use: the copies wait.
        event = self._accelerator.record_event()
        for unit in units:
            self._lanes.observer.doing(OpKind.FETCH, unit.name)
            for record in unit.records:
                refresh_master(record)
            staging = []
            for part, records in _members(unit):
                nbytes = _visit_bytes(part, records)
                mine, block = block[:nbytes], block[nbytes:]
                staging.append(self._fetch_part(part, records, mine, event))
            unit.staging = staging
            self._staged.append(unit)

    def _fetch_part(
        self, part: PartStorage, records: Iterable[ParamRecord], block: torch.Tensor, event: Event
    ) -> StagedPart:
        state_bytes = _state_item_bytes(part) * part.elements
        staged = StagedPart(part, block[:state_bytes])
        spans = [
            (there.data_ptr(), here.data_ptr(), here.numel() * here.element_size())
            for here, there in (*staged.state_pairs(part), *staged.weight_pairs(part))
        ]
        sums = block[state_bytes:].view(torch.float32)
        if sums.numel():
            spans.append((sums.data_ptr(), part.gradient_address, sums.nbytes))
        ticket = self._lanes.fetch(spans, after=follow(part), event=event.handle)
        staged.ticket = part.ticket = self._lanes.hold(ticket, block, event)
        if sums.numel():
            _return_sums(part, records, sums, ticket)
        return staged

    def _block(self, nbytes: int, *, hole: Hole, units: int) -> torch.Tensor:
        what = f"state of {units} units on their visit"
        reservation = self._ledger.reserve(Tier.DEVICE, Role.STAGING, nbytes, what=what)
        block = self._room.take(nbytes, hole=hole)
        weakref.finalize(block.untyped_storage(), reservation.release).atexit = False
        return block

    def await_state(self, unit: Unit) -> list[StagedPart]:
        """Order the compute stream after the arrival of a unit's state."""
        assert unit.staging is not None
        with self._lanes.waiting(f"state of {unit.name}"):
            for staged in unit.staging:
                self._accelerator.wait_for(staged.ticket)
        return unit.staging

    def write_back(self, unit: Unit) -> tuple[int, list[Any]]:
        """Send a unit's updated state home; its weights first, since the next forward loads them.

        Returns:
            The bytes enqueued, and for each part the ticket of its weights, or of all where they
            live on the device.
        """
        assert unit.staging is not None
        moved, homes = 0, []
        event = self._accelerator.record_event()
        for part, staged in zip(unit.parts, unit.staging, strict=True):
            sent = [
                self._lanes.land(
                    [(host.data_ptr(), here.data_ptr(), host.nbytes) for host, here in pairs],
                    event=event.handle,
                    after=[staged.ticket, *part.loads],
                    urgent=urgent,
                )
                for pairs, urgent in (
                    (staged.weight_pairs(part), True),
                    (staged.state_pairs(part), False),
                )
                if pairs
            ]
            tickets = [ticket for ticket, _ in sent]
            home = tickets[0] if len(tickets) == 1 else self._lanes.join(tickets)
            part.ticket = self._lanes.hold(home, staged.block, event)
            self._leaving.append(home)
            homes.append(tickets[0])
            part.high_is_stale = not part.stores_on_host and part.master is not MasterLayout.WHOLE
            moved += sum(nbytes for _, nbytes in sent)
        unit.staging = None
        return moved, homes

    def settle(self, *, everything: bool) -> None:
        """Let go of what has left; wait for write-backs, so that their memory is free again.

        Gradients that landed after `step()` would otherwise stay until the next backward, in the
        middle of its activations.

        Args:
            everything: Wait for all of them, and for gradients of the backward before, as before a
                model's last unit, with which its largest activations (the logits) come; else for
                the oldest ones, while activations have grown to the mark that staging must stay
                under.
        """
        if everything:
            self._lanes.await_gradients()
        self._lanes.reap()
        while self._leaving and (everything or self._room.is_tight()):
            with self._lanes.waiting("state to go home"):
                self._leaving.popleft().wait()
            self._lanes.reap()
        if everything:
            self._room.emptied()

    def drop(self) -> None:
        """The step was skipped or its window discarded: forget what came up."""
        for unit in self._staged:
            unit.staging = None
        self._staged.clear()
        self._waiting.clear()


def _state_item_bytes(part: PartStorage) -> int:
    """Bytes per element of a part's state that a visit to the device moves each way."""
    own = part.dtype.itemsize if part.stores_on_host else 0
    if part.low is not None:
        return 10 + own
    return own + (12 if part.master is MasterLayout.WHOLE else 8)


def _has_landed_for_good(record: ParamRecord) -> bool:
    """Whether the gradient must be used where it is: only fp32 sums come back to the device."""
    return record.state is GradientState.LANDED and record.part.gradient_dtype != "float32"


def _members(unit: Unit) -> Iterable[tuple[PartStorage, tuple[ParamRecord, ...]]]:
    return zip(unit.parts, unit.records_of_part, strict=True)


def _state_bytes(unit: Unit) -> int:
    return sum(_visit_bytes(part, records) for part, records in _members(unit))


def _gradient_bytes(unit: Unit) -> int:
    """What stays on the device too once the gradient is there."""
    return sum(part.dtype.itemsize * part.elements for part in unit.parts)


def _visit_bytes(part: PartStorage, records: Iterable[ParamRecord]) -> int:
    """Bytes that come up: the state, and the sums of earlier backwards if there are any."""
    landed = any(record.state is GradientState.LANDED for record in records)
    return (_state_item_bytes(part) + (SUM_ITEM_BYTES if landed else 0)) * part.elements


def _return_sums(
    part: PartStorage, records: Iterable[ParamRecord], sums: torch.Tensor, arrival: Any
) -> None:
    for record in records:
        if record.state is GradientState.LANDED:
            record.return_sum(part.view(sums, record.slot), arrival)
