"""The rest of one part: clipped gradients of several steps, gathered on the host in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from forebay.engine.gradients import follow
from forebay.links.lanes import wait
from forebay.model.layout import ITEM_BYTES, SUM_ITEM_BYTES
from forebay.optim.rule import float32
from forebay.plan.placement import MasterLayout
from forebay.tiers.host import HostArena
from forebay.tiers.ledger import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.engine.part import PartStorage
    from forebay.engine.record import ParamRecord
    from forebay.engine.state_memory import PartMemory
    from forebay.links.lanes import Lanes

__all__ = ["GatheredRest", "RunningRest"]


@dataclass(slots=True)
class RunningRest:
    """An update of a unit's rest whose weights are not in force.

    Attributes:
        tickets: For each part, its update; None where it has none.
        used: For each part, the buffer that it uses.
        changed: Indices of the parameters that it updates.
    """

    tickets: list[Any]
    used: list[HostArena]
    changed: set[int]


class GatheredRest:
    """Sums of a part's gradients.

    Args:
        part: The part.
        buffers: 1, or 2 where one is used by an update while the other gathers.
        memory: Where memory comes from.

    Attributes:
        counts: By parameter index, how many gradients are in its sum.
    """

    def __init__(self, part: PartStorage, *, buffers: int, memory: PartMemory) -> None:
        self._part = part
        # Whole masters' new weights are written over the sum, and go up from there.
        crosses = part.master is MasterLayout.WHOLE
        self._arenas = [
            HostArena(
                SUM_ITEM_BYTES * part.elements,
                ledger=memory.ledger,
                role=Role.CONTIGUOUS_GRAD_BUFFER,
                what=f"gathered gradients of {part.elements} parameters",
                page_locking=memory.page_locking if crosses else None,
            )
            for _ in range(buffers)
        ]
        self._tickets: list[Any] = [None] * buffers
        self._turn = 0
        self.counts: dict[int, int] = {}

    @property
    def arena(self) -> HostArena:
        """The buffer that gathers."""
        return self._arenas[self._turn]

    def gather(self, records: Sequence[ParamRecord], *, scale: float, lanes: Lanes) -> None:
        """Add landed gradients, multiplied by `scale`, in the order of the calls."""
        part = self._part
        item, dtype = ITEM_BYTES[part.gradient_dtype], part.gradient_dtype
        for first in (True, False):
            chosen = [r for r in records if (r.index not in self.counts) is first]
            spans = [
                (
                    self.arena.address + SUM_ITEM_BYTES * r.segment.offset,
                    part.gradient_address + item * r.segment.offset,
                    r.segment.elements,
                )
                for r in chosen
                if r.segment.elements
            ]
            if spans:
                part.await_readers()
                after = follow(part)
                if self._tickets[self._turn] is not None:
                    after.append(self._tickets[self._turn])
                ticket = lanes.fold(spans, dtype, first, after, scale)
                part.ticket = lanes.hold(ticket)
        for record in records:
            self.counts[record.index] = self.counts.get(record.index, 0) + 1

    def take_means(self, records: Sequence[ParamRecord]) -> None:
        """Let sums of different numbers of gradients be means, where one pass must take them all.

        Whole masters' new weights are written over the sums of a piece in ascending order, so that
        a pass for each number would overwrite what the next one reads. Waits for what gathers.
        """
        if self._part.master is not MasterLayout.WHOLE or len(set(self.counts.values())) < 2:
            return
        wait(self._part.ticket, "gathering gradients")
        for record in records:
            self.sums(record).mul_(float32(1.0 / self.counts[record.index]))
            self.counts[record.index] = 1

    def turn_over(self, ticket: Any) -> None:
        """An update uses the sums: gather in the next buffer, which may be the same.

        Args:
            ticket: When they have been used.
        """
        self._tickets[self._turn] = ticket
        self._turn = (self._turn + 1) % len(self._arenas)
        self.counts.clear()

    def follow(self, used: HostArena, ticket: Any) -> None:
        """Gather in a buffer only when `ticket` is done, too."""
        self._tickets[self._arenas.index(used)] = ticket

    def sums(self, record: ParamRecord) -> torch.Tensor:
        """What is gathered of a parameter; nothing may be writing it."""
        segment = record.segment
        return self.arena.tensor(
            torch.float32,
            offset_bytes=SUM_ITEM_BYTES * segment.offset,
            elements=segment.elements,
        )

    def close(self) -> None:
        """Give the memory back."""
        for arena in self._arenas:
            arena.close()
