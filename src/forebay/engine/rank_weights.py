"""Slices of weights on all ranks as the source of units' weights on the device: one gather.

Each gather begins with a handshake, so that ranks that need different units are told so instead
of mixing up their bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forebay.comm.collectives import Purpose
from forebay.comm.passes import PassKind
from forebay.plan.program import Lane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.accelerators.base import Waitable
    from forebay.comm.queue import Queue
    from forebay.engine.part import PartStorage
    from forebay.engine.unit import Unit
    from forebay.links.lanes import Lanes

__all__ = ["RankWeights"]


class RankWeights:
    """Gathers units; a `forebay.engine.residency.WeightSource`.

    Args:
        queue: Where gathers take their turn among the other collectives.
        lanes: Counts bytes.
    """

    def __init__(self, queue: Queue, *, lanes: Lanes) -> None:
        self._queue = queue
        self._lanes = lanes
        # What last wrote a part's slice.
        self._writes: dict[int, Sequence[Any]] = {}

    def follow_update(self, part: PartStorage, update: Any) -> None:
        """Gathers of a part follow an update of its slice."""
        self._writes[id(part)] = [update]

    def follow_write(self, part: PartStorage, ticket: Any) -> None:
        """Gathers of a part follow a transfer that writes its slice."""
        self._writes[id(part)] = [] if ticket is None else [ticket]

    def follow_all(self, unit: Unit, tickets: Sequence[Any]) -> None:
        """Gathers of a unit follow these transfers, which write its slices."""
        for part in unit.parts:
            self._writes[id(part)] = tickets

    def bring(self, unit: Unit) -> Sequence[Waitable]:
        """See `WeightSource`."""
        passes = self._queue.passes
        this = passes.begin(PassKind.GATHER)
        number = float(unit.index)
        after = [ticket for part in unit.parts for ticket in self._writes.get(id(part), ())]

        def _gather() -> None:
            passes.meet_in_unit(this, number, name=unit.name)
            with torch.no_grad():
                for part in unit.parts:
                    self._fill(part)

        job = self._queue.submit(_gather, what=f"the weights of {unit.name}", after=after)
        # No update writes a slice under a gather: the handshake of a step comes after it.
        for part in unit.parts:
            if unit.stores_off_device:
                self._lanes.traffic[Lane.UP] += part.dtype.itemsize * part.elements
        return [job]

    def _fill(self, part: PartStorage) -> None:
        """In the queue's thread: the whole flat part, then each parameter into its home."""
        assert part.home is not None
        own = part.read_own_weights(0, part.elements).to(part.device, non_blocking=True)
        whole = torch.empty(part.layout.elements, dtype=part.dtype, device=part.device)
        self._queue.collectives.gather(whole, own, purpose=Purpose.WEIGHTS)
        for slot in part.layout.slots:
            part.home.tensor(slot).copy_(whole[slot.offset : slot.end].view(slot.shape))
