"""What becomes of new weights: they go up to the device, or wait on the host for the next pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.model.layout import ITEM_BYTES
from forebay.plan.placement import MasterLayout
from forebay.plan.program import Lane

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from forebay.engine.host_weights import HostWeights
    from forebay.engine.part import PartStorage
    from forebay.engine.rank_weights import RankWeights
    from forebay.engine.record import ParamRecord
    from forebay.engine.residency import Residency
    from forebay.engine.unit import NanSource, Unit
    from forebay.links.lanes import Lanes

__all__ = ["Publisher"]


class Publisher:
    """Takes units after their updates.

    Args:
        lanes: The link.
        nans: What weights on their way are viewed as.
        piece_elements: Elements of one piece of an update and of the copy that follows it.
        residency: Where weights that live on the host are on the device for now.
        source: Brings those.
        is_gathered: Whether what goes up is a slice that is then gathered over ranks.

    Attributes:
        arrivals: By unit, what such a gathering follows.
    """

    def __init__(
        self,
        lanes: Lanes,
        *,
        nans: NanSource,
        piece_elements: int,
        residency: Residency,
        source: HostWeights | RankWeights,
        is_gathered: bool = False,
    ) -> None:
        self._lanes = lanes
        self._nans = nans
        self._piece = piece_elements
        self._plans: dict[PartStorage, tuple[tuple[int, ...], Any]] = {}
        self._residency = residency
        self._source = source
        self._is_gathered = is_gathered
        self.arrivals: dict[int, list[Any]] = {}

    def publish(self, unit: Unit, updates: Sequence[Any], changed: Container[int]) -> None:
        """The host updates a unit.

        Args:
            unit: The unit.
            updates: The ticket of each part's update; None where it has none.
            changed: Indices of the parameters that change.
        """
        if unit.stores_off_device:
            self._renew(unit, changed)
            for part, update in zip(unit.parts, updates, strict=True):
                if update is not None:
                    self._source.follow_update(part, update)
            return
        arrivals, arriving = [], []
        event = self._lanes.accelerator.record_event()
        for part, records, update in zip(unit.parts, unit.records_of_part, updates, strict=True):
            if update is None:
                continue
            present = [record for record in records if record.index in changed]
            plan = self._plan(part, present)
            ticket = self._lanes.publish(plan, after=update, event=event.handle)
            self._lanes.traffic[Lane.UP] += plan.nbytes
            part.ticket = self._lanes.hold(ticket, event)
            arrivals.append(ticket)
            arriving.extend(present)
        self.await_arrivals(unit, arriving, arrivals)

    def await_arrivals(
        self, unit: Unit, records: Sequence[ParamRecord], arrivals: Sequence[Any]
    ) -> None:
        """A unit's new weights are on their way to the device: pending until they are there."""
        if self._is_gathered:
            self.arrivals[unit.index] = list(arrivals)
        elif records:
            unit.await_weights(records, arrivals, self._nans)

    def written_back(self, unit: Unit, changed: Container[int], tickets: Sequence[Any]) -> None:
        """A unit's new weights on the host are there once each part's ticket is done.

        Its state was updated on the device and is on its way home, or was updated from files.
        """
        if unit.stores_off_device:
            self._renew(unit, changed)
            for part, ticket in zip(unit.parts, tickets, strict=True):
                self._source.follow_write(part, ticket)

    def _renew(self, unit: Unit, changed: Container[int]) -> None:
        self._residency.renew(unit, [r for r in unit.records if r.index in changed])

    def _plan(self, part: PartStorage, present: Sequence[ParamRecord]) -> Any:
        """Spans from the host's new weights to the device, cut where the update's pieces are.

        Plans hold addresses; one is used again while it would be the same.
        """
        item, pitch, source = _weights_on_host(part)
        target = part.own_weights.data_ptr()
        key = (pitch, source, target, *[record.index for record in present])
        known = self._plans.get(part)
        if known is not None and known[0] == key:
            return known[1]
        plan = self._lanes.core.CopyPlan(1 << 62)
        self._plans[part] = (key, plan)
        for record in present:
            start, end = record.segment.offset, record.segment.end
            while start < end:
                piece = start // self._piece
                stop = min(end, (piece + 1) * self._piece)
                head = piece * self._piece
                where = source + head * pitch + (start - head) * item
                plan.add(piece, target + start * item, where, (stop - start) * item)
                start = stop
        return plan


def _weights_on_host(part: PartStorage) -> tuple[int, int, int]:
    """(item bytes, bytes between piece starts per element, address) of new weights."""
    item = ITEM_BYTES[part.layout.dtype]
    if part.rounded_apart is not None:
        return item, item, part.rounded_apart.data_ptr()
    if part.master is MasterLayout.WHOLE:
        # written over the gradient, compacted within each piece
        return item, ITEM_BYTES[part.gradient_dtype], part.gradient_address
    return item, item, part.high.data_ptr()
