"""Weights in files on their way to the device: read, compared with their checksums, copied up.

A few buffers in host memory carry pieces; a load enqueues everything at once, each link of a
piece's chain after the ticket of the one before:

    read (its buffer is free, the last write is there) -> compare -> copy up -> buffer is free

New weights leave with the update (`engine.spool`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.engine.direct_weights import DirectWeights
from forebay.links.host_nvme import Urgency
from forebay.links.lanes import PIECE_BYTES
from forebay.plan.memory import weight_buffer_bytes
from forebay.plan.program import Lane, OpKind
from forebay.plan.records import SUM_ELEMENTS
from forebay.tiers.host import HostArena
from forebay.tiers.ledger import Role
from forebay.tiers.nvme import aligned

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from forebay.accelerators.base import Event
    from forebay.engine.file_state import FileState
    from forebay.engine.part import PartStorage
    from forebay.engine.state_memory import PartMemory
    from forebay.links.lanes import Lanes
    from forebay.plan.placement import Placement

__all__ = ["WeightPiece", "WeightSpool", "weight_spool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPiece:
    """Elements of one record of weights that pass through a buffer together.

    Attributes:
        state: The files.
        index: The record.
        first: First element, in the record; a multiple of `SUM_ELEMENTS`.
        last: One past the last.
    """

    state: FileState
    index: int
    first: int
    last: int

    @classmethod
    def whole(cls, state: FileState, index: int) -> WeightPiece:
        """All of a record."""
        return cls(state=state, index=index, first=0, last=state.records[index].elements)

    @classmethod
    def cut(cls, state: FileState, *, elements: int) -> Iterator[WeightPiece]:
        """All records in pieces of so many elements at most."""
        for index, record in enumerate(state.records):
            for first in range(0, record.elements, elements):
                last = min(first + elements, record.elements)
                yield cls(state=state, index=index, first=first, last=last)

    @property
    def begin(self) -> int:
        """The first element, in the shard."""
        return self.state.records[self.index].begin + self.first

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return self.state.dtype.itemsize

    def span(self, address: int) -> tuple[int, int, int]:
        """(offset, address, bytes) of its transfer: whole sectors."""
        offset = self.state.offset(self.index) + self.item_bytes * self.first
        return offset, address, aligned(self.item_bytes * (self.last - self.first))

    def sums(self, lanes: Lanes, action: str, *, at: int, after: list[Any]) -> Any:
        """Enqueue its checksums, "store" or "compare", where it lies at an address."""
        block = self.first // SUM_ELEMENTS
        count = -(-(self.last - self.first) // SUM_ELEMENTS)
        names = self.state.names_of(self.index)[block : block + count]
        ticket = lanes.checksums(
            action,
            at,
            self.item_bytes * (self.last - self.first),
            self.item_bytes * SUM_ELEMENTS,
            self.state.sums_address(self.index) + 4 * block,
            names,
            after,
        )
        return lanes.hold(ticket)


class WeightSpool:
    """Buffers between files and the device.

    Args:
        lanes: The link to the device, and whoever compares checksums.
        placement: How many buffers, and of what size.
        memory: Files, ledger and page-locking policy.
    """

    def __init__(self, lanes: Lanes, *, placement: Placement, memory: PartMemory) -> None:
        assert memory.files is not None
        self._lanes = lanes
        self._link = memory.files.link
        self._piece = placement.weight_buffers.piece_elements
        count, size = placement.weight_buffers.count, weight_buffer_bytes(placement)
        self._arena = HostArena(
            count * size,
            ledger=memory.ledger,
            role=Role.STAGING,
            what="weights between files and the device",
            page_locking=memory.page_locking,
        )
        # (address, what must have ended before it is filled again), the oldest use first.
        self._buffers: list[tuple[int, list[Any]]] = [
            (self._arena.address + number * size, []) for number in range(count)
        ]

    def bring(
        self, part: PartStorage, *, name: str, event: Event, slice_of: torch.Tensor | None = None
    ) -> list[Any]:
        """Enqueue what fills a part's homes; returns the tickets of its copies.

        Args:
            part: Whose weights in files.
            name: Its unit's.
            event: What the device must have done before.
            slice_of: [part.elements] on the device, filled instead of the homes: this rank's slice.
        """
        assert part.weight_files is not None
        tickets = []
        for piece in WeightPiece.cut(part.weight_files, elements=self._piece):
            self._lanes.observer.doing(OpKind.READ_WEIGHTS, name)
            address, users = self._buffers.pop(0)
            written = part.weight_files.written[piece.index]
            if written is not None:
                users = [*users, written]
            span = piece.span(address)
            # Before state that is read ahead: there may be gigabytes of that in the queue.
            ticket = self._link.read(span, after=users, urgency=Urgency.WAITED_FOR)
            read = self._lanes.hold(ticket)
            self._lanes.observer.submitted(Lane.READ, read, span[2])
            self._lanes.traffic[Lane.READ] += span[2]
            known = piece.sums(self._lanes, "compare", at=address, after=[read])
            self._lanes.observer.doing(OpKind.LOAD, name)
            if slice_of is None:
                plan = self._plan(part, piece, address)
            else:
                plan = self._plan_of_slice(slice_of, piece, address)
            copy = self._lanes.load(plan, after=[known], piecewise=None, event=event.handle)
            self._lanes.traffic[Lane.UP] += plan.nbytes
            tickets.append(self._lanes.hold(copy, event, slice_of))
            self._buffers.append((address, [copy]))
        part.loads += tickets
        return tickets

    def _plan(self, part: PartStorage, piece: WeightPiece, address: int) -> Any:
        """Spans from a buffer to the homes of what it holds."""
        assert part.home is not None
        plan = self._lanes.core.CopyPlan(PIECE_BYTES)
        item, begin = part.dtype.itemsize, piece.begin
        for slot in part.layout.slots:
            first, last = max(slot.offset, begin), min(slot.end, begin + piece.last - piece.first)
            if first < last:
                target = part.home.tensor(slot).data_ptr() + (first - slot.offset) * item
                plan.append(target, address + (first - begin) * item, (last - first) * item)
        return plan

    def _plan_of_slice(self, target: torch.Tensor, piece: WeightPiece, address: int) -> Any:
        """A span from a buffer to where it lies in a flat slice."""
        plan = self._lanes.core.CopyPlan(PIECE_BYTES)
        item = target.element_size()
        where = target.data_ptr() + piece.begin * item
        plan.append(where, address, (piece.last - piece.first) * item)
        return plan

    def close(self) -> None:
        """Give the memory back; the lanes are closed. Idempotent."""
        self._buffers.clear()
        self._arena.close()


def weight_spool(
    lanes: Lanes, *, placement: Placement, memory: PartMemory
) -> WeightSpool | DirectWeights:
    """What brings weights in files up: past host memory where the machine can, else through it."""
    assert memory.files is not None
    if memory.files.direct is not None:
        return DirectWeights(lanes, file=memory.files.direct)
    return WeightSpool(lanes, placement=placement, memory=memory)
