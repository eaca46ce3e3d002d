"""Copy plans, staging rings and links that copy before they return."""

# The signatures are the native core's.
# ruff: noqa: ARG002, FBT001, FBT002, PLR0913, PLR0917

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay._fallback import memory
from forebay._fallback.tickets import Ticket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay._fallback.engines import CopyEngine
    from forebay._fallback.pool import Pool

__all__ = ["CopyPlan", "Link", "StagingRing"]

_MOST_STREAMS = 64


class CopyPlan:
    """Which bytes go where, in pieces."""

    def __init__(self, piece_bytes: int) -> None:
        if piece_bytes < 1:
            raise ValueError(f"piece_bytes must be at least 1, not {piece_bytes}")
        self._piece_bytes = piece_bytes
        self._last_bytes = 0
        self.spans: list[list[tuple[int, int, int]]] = []
        self.nbytes = 0

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return len(self.spans)

    def append(self, dst: int, src: int, nbytes: int) -> None:
        """Pack a copy behind the last one, splitting it where a piece is full."""
        self.nbytes += nbytes
        while nbytes > 0:
            if not self.spans or self._last_bytes >= self._piece_bytes:
                self.spans.append([])
                self._last_bytes = 0
            now = min(nbytes, self._piece_bytes - self._last_bytes)
            self.spans[-1].append((dst, src, now))
            self._last_bytes += now
            dst, src, nbytes = dst + now, src + now, nbytes - now

    def add(self, piece_index: int, dst: int, src: int, nbytes: int) -> None:
        """Place a copy in a piece, whatever its size."""
        while piece_index >= len(self.spans):
            self.spans.append([])
            self._last_bytes = 0
        if nbytes:
            self.spans[piece_index].append((dst, src, nbytes))
        self.nbytes += nbytes
        if piece_index + 1 == len(self.spans):
            self._last_bytes += nbytes


class StagingRing:
    """Equal slots of host memory; one copy at a time needs one of them."""

    def __init__(self, addr: int, slot_bytes: int, slots: int) -> None:
        if not addr or not slots or not slot_bytes or addr % 4 or slot_bytes % 4:
            raise ValueError(
                "a staging ring needs an address, at least one slot and slots of a multiple of 4 "
                f"bytes; got {slots} slots of {slot_bytes} bytes at {addr}"
            )
        self.addr = addr
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.slots_free = slots


class Link:
    """Copies in the calling thread, in the order of the calls."""

    def __init__(
        self,
        engine: CopyEngine,
        streams: Sequence[int] = (0,),
        max_in_flight: int = 2,
        shuffle_seed: int = -1,
        name: str = "link",
        awaits_events: bool = False,
    ) -> None:
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight must be at least 1, not {max_in_flight}")
        if not 1 <= len(streams) <= _MOST_STREAMS:
            raise ValueError(f"a link needs 1 to {_MOST_STREAMS} streams, not {len(streams)}")
        self._engine = engine
        self._name = name
        self._closed = False

    def copy(
        self,
        plan: CopyPlan,
        priority: int = 0,
        after: Sequence[Ticket] = (),
        piecewise: Ticket | None = None,
        event: int = 0,
    ) -> Ticket:
        """Copy a plan."""
        self._check_open()

        def work() -> None:
            for index, spans in enumerate(plan.spans):
                self._engine.copy(spans, event=0 if index else event)

        predecessors = [*after] if piecewise is None else [*after, piecewise]
        return Ticket.of(plan.pieces, after=predecessors, work=work)

    def copy_fold(
        self,
        pool: Pool,
        spans: Sequence[tuple[int, int, int]],
        src_dtype: str,
        first: bool,
        ring: StagingRing,
        priority: int = 0,
        after: Sequence[Ticket] = (),
        event: int = 0,
    ) -> Ticket:
        """Bring spans through a slot of the ring and fold them there."""
        self._check_open()
        item = memory.dtype_of(src_dtype).itemsize
        pieces = _pack(spans, ring.slot_bytes // item, item)

        def work() -> None:
            for index, piece in enumerate(pieces):
                copies = [
                    (ring.addr + offset * item, source, elements * item)
                    for _, source, elements, offset in piece
                ]
                self._engine.copy(copies, event=0 if index else event)
                folds = [
                    (accumulator, ring.addr + offset * item, elements)
                    for accumulator, _, elements, offset in piece
                ]
                pool.fold(folds, src_dtype, first).wait()

        return Ticket.of(len(pieces), after=after, work=work)

    def close(self) -> None:
        """Refuse work from now on."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"link '{self._name}' is closed")


def _pack(
    spans: Sequence[tuple[int, int, int]], slot_elements: int, item: int
) -> list[list[tuple[int, int, int, int]]]:
    """(accumulator, source, elements, offset in the slot) of each piece."""
    pieces: list[list[tuple[int, int, int, int]]] = []
    used = slot_elements
    for span in spans:
        accumulator, source, elements = span
        while elements > 0:
            if used == slot_elements:
                pieces.append([])
                used = 0
            now = min(elements, slot_elements - used)
            pieces[-1].append((accumulator, source, now, used))
            used += now
            accumulator, source = accumulator + 4 * now, source + item * now
            elements -= now
    return pieces
