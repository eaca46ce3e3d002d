"""Weights on the host or in files as the source of units' weights on the device.

From the host it is one copy, on its own lane; files are `engine.weight_spool`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.plan.program import Lane, OpKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from forebay.accelerators.base import Waitable
    from forebay.engine.direct_weights import DirectWeights
    from forebay.engine.part import PartStorage
    from forebay.engine.unit import Unit
    from forebay.engine.weight_spool import WeightSpool
    from forebay.links.lanes import Lanes

__all__ = ["HostWeights"]


class HostWeights:
    """Copies stored weights up; each piece follows the update of that piece.

    Args:
        lanes: The link.
        piece_elements: Elements of one piece of an update.
        spool: Brings weights in files; None where there are none.
    """

    def __init__(
        self,
        lanes: Lanes,
        *,
        piece_elements: int,
        spool: WeightSpool | DirectWeights | None = None,
    ) -> None:
        self._lanes = lanes
        self._piece = piece_elements
        self._spool = spool
        # What last wrote a part's stored weights: whole, or piece by piece.
        self._writes: dict[int, Any] = {}
        self._updates: dict[int, Any] = {}

    def follow_update(self, part: PartStorage, update: Any) -> None:
        """Loads of a part follow an update on the host, piece by piece."""
        self._updates[id(part)] = update
        self._writes.pop(id(part), None)

    def follow_write(self, part: PartStorage, ticket: Any) -> None:
        """Loads of a part follow a transfer that writes its weights; None if none ever did."""
        if ticket is not None:
            self._writes[id(part)] = ticket
        self._updates.pop(id(part), None)

    looks_ahead = True

    def meet_readers(self) -> None:
        """Nobody else is asked."""

    def take_from_rank(self, param: torch.Tensor, *, rank: int) -> None:
        """There is no other."""

    def bring(self, unit: Unit) -> Sequence[Waitable]:
        """See `WeightSource`."""
        self._lanes.observer.doing(OpKind.LOAD, unit.name)
        # The allocator may hand out memory that enqueued kernels still use: the copy waits.
        event = self._lanes.accelerator.record_event()
        tickets: list[Any] = []
        for part in unit.parts:
            part.loads = [one for one in part.loads if not one.done]
            if part.weight_files is not None:
                assert self._spool is not None
                tickets += self._spool.bring(part, name=unit.name, event=event)
                continue
            update = self._updates.get(id(part))
            plan = self._plan(part)
            after = [self._writes[id(part)]] if id(part) in self._writes else []
            ticket = self._lanes.load(plan, after=after, piecewise=update, event=event.handle)
            self._lanes.traffic[Lane.UP] += plan.nbytes
            part.loads.append(self._lanes.hold(ticket, event))
            tickets.append(ticket)
        return tickets

    def _plan(self, part: PartStorage) -> Any:
        """Spans from the stored weights to their homes, cut where an update's pieces are."""
        assert part.home is not None
        plan = self._lanes.core.CopyPlan(1 << 62)
        item, source = part.weights.element_size(), part.weights.data_ptr()
        for slot in part.layout.slots:
            target = part.home.tensor(slot).data_ptr()
            start = slot.offset
            while start < slot.end:
                piece = start // self._piece
                stop = min(slot.end, (piece + 1) * self._piece)
                where = target + (start - slot.offset) * item
                plan.add(piece, where, source + start * item, (stop - start) * item)
                start = stop
        return plan
