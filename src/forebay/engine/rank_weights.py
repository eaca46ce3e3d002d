"""Slices of weights on all ranks as the source of units' weights on the device: one gather.

Each gather begins with a handshake, in which ranks that need different units find out and gather
each of them together (`forebay.comm.passes`, [Note: rounds]).

Slices in files are read while the gathers before them run, into memory of the device, as soon as
their unit is asked for: as many as the pool has room for units.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forebay.comm.collectives import Purpose
from forebay.links.observer import Moment
from forebay.plan.program import Lane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.accelerators.base import Waitable
    from forebay.comm.queue import Queue
    from forebay.engine.part import PartStorage
    from forebay.engine.unit import Unit
    from forebay.engine.weight_spool import WeightSpool
    from forebay.links.lanes import Lanes

__all__ = ["RankWeights"]

_log = logging.getLogger("forebay")


class RankWeights:
    """Gathers units; a `forebay.engine.residency.WeightSource`.

    Args:
        queue: Where gathers take their turn among the other collectives.
        units: Every unit by index.
        lanes: Counts bytes.
        spool: Reads slices in files; None where there are none.
    """

    def __init__(
        self,
        queue: Queue,
        *,
        units: Sequence[Unit],
        lanes: Lanes,
        spool: WeightSpool | None = None,
    ) -> None:
        self._queue = queue
        self._units = units
        self._lanes = lanes
        self._spool = spool
        # Slices that are read ahead, by part, in the order of their gathers.
        self._ahead: dict[int, deque[_Slice]] = {}
        self._has_said = False
        queue.is_gated = any(unit.streams_weights for unit in units)
        queue.passes.serve = self._serve
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
        number, name = unit.index, unit.name
        self._read_ahead(unit)
        work = partial(self._queue.passes.gather, number, name=name)
        job = self._queue.meet(work, what=f"the weights of {name}")
        # No update writes a slice under a gather: the handshake of a step comes after it.
        for part in unit.parts:
            if unit.stores_off_device and part.weight_files is None:
                self._lanes.traffic[Lane.UP] += part.dtype.itemsize * part.elements
        return [job]

    def _read_ahead(self, unit: Unit) -> None:
        """Read a unit's slices in files now, for the gather that is asked for next."""
        for part in unit.parts:
            if part.weight_files is None:
                continue
            assert self._spool is not None
            part.loads = [one for one in part.loads if not one.done]
            values = torch.empty(part.elements, dtype=part.dtype, device=part.device)
            self._queue.uses(values)
            event = self._lanes.accelerator.record_event()
            arrivals = self._spool.bring(part, name=unit.name, event=event, slice_of=values)
            one = _Slice(values=values, arrivals=arrivals)
            self._ahead.setdefault(id(part), deque()).append(one)

    def meet_readers(self) -> None:
        """See `WeightSource`."""
        self._queue.submit(_nothing, what="a state dict").wait()

    def take_from_rank(self, param: torch.Tensor, *, rank: int) -> None:
        """See `WeightSource`."""
        queue, own = self._queue, param.detach().reshape(-1).clone()
        job = queue.submit(partial(self._take, own, rank), what="a weight that one rank wrote")
        job.wait()
        with torch.no_grad():
            param.copy_(job.result.view(param.shape))

    def _take(self, own: torch.Tensor, rank: int) -> torch.Tensor:
        """In the queue's thread: from the rank's own copy of the state, then from that copy."""
        collectives = self._queue.collectives
        group = collectives.group
        here = torch.tensor([group.copy, group.shard], dtype=torch.float64)
        told = group.tell(here, what="whose weight is taken over")
        copy, shard = map(int, told[rank].tolist())
        rows = own.new_empty((len(group.sharers), own.numel()))
        collectives.gather(rows.view(-1), own, purpose=Purpose.STATE)
        copies = group.size // len(group.sharers)
        if copies == 1:
            return rows[shard]
        held = rows[shard].clone()
        across = held.new_empty((copies, held.numel()))
        group.gather_copies(across.view(-1), held)
        return across[copy]

    @property
    def looks_ahead(self) -> bool:
        """See `WeightSource`; not after a window in which ranks needed different units."""
        return not self._queue.passes.was_uneven

    def _serve(self, number: int, *, keeps: bool, is_even: bool) -> None:
        """In the queue's thread: gather a unit, to keep it or for the others alone."""
        unit = self._units[number]
        if not is_even:
            self._say(unit)
        with torch.no_grad():
            for part in unit.parts:
                for ticket in self._writes.get(id(part), ()):
                    self._queue.follow(ticket)
                self._gather(part, keeps=keeps)

    def _say(self, unit: Unit) -> None:
        self._lanes.mark(Moment.GATHERED_UNEVENLY, unit.name)
        if not self._has_said:
            self._has_said = True
            _log.warning(
                "some ranks needed the weights of unit %s when others did not: such units are "
                "gathered when they are needed, and nothing is gathered ahead in the next window; "
                "forebay.utils.set_z3_leaf_modules makes one unit of modules that choose by data",
                unit.name,
            )

    def _gather(self, part: PartStorage, *, keeps: bool) -> None:
        """The whole flat part, then each parameter into its home."""
        own = self._own(part, keeps=keeps)
        whole = torch.empty(part.layout.elements, dtype=part.dtype, device=part.device)
        self._queue.collectives.gather(whole, own, purpose=Purpose.WEIGHTS)
        if not keeps:
            return
        assert part.home is not None
        for slot in part.layout.slots:
            part.home.tensor(slot).copy_(whole[slot.offset : slot.end].view(slot.shape))

    def _own(self, part: PartStorage, *, keeps: bool) -> torch.Tensor:
        """This rank's slice, on the device: as it was read ahead for a gather of this rank's."""
        ahead = self._ahead.get(id(part))
        if not keeps or not ahead:
            return part.read_own_weights(0, part.elements).to(part.device, non_blocking=True)
        one = ahead.popleft()
        for ticket in one.arrivals:
            self._queue.follow(ticket)
        return one.values


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """A slice on its way from files to the device."""

    values: torch.Tensor
    arrivals: Sequence[Any]


def _nothing() -> None:
    """The meeting alone counts."""
