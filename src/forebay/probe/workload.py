"""The work that is measured: one part's update, copies by threads, and both directions of a link.

Everything runs in the native pool and lanes that training uses; times come from their tickets.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forebay.links.lanes import PIECE_BYTES
from forebay.tiers.host import HostArena
from forebay.tiers.ledger import Ledger, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.accelerators.base import Accelerator
    from forebay.tiers.page_locking import PageLocking

__all__ = [
    "BYTES_PER_PARAMETER",
    "LinkEnds",
    "PartState",
    "Run",
    "copy_runs",
    "middle",
    "rate_in_common",
    "state_bytes",
    "timed",
    "update_runs",
]

# Host memory traffic of one fused pass: fp32 master, moments and gradient in, the first three
# out (28); with split masters 16 bits beside the bf16 weight, and a bf16 gradient (26).
BYTES_PER_PARAMETER = {"whole": 28, "split": 26}
_PIECE_ELEMENTS = 4 << 20
# Different numbers of a state, which are repeated.
_FILLING = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Roles:
    """Bytes per parameter of each array, in the order in which they lie in the arena."""

    grad: int
    master: int
    low: int
    moments: int = 8

    @property
    def nbytes(self) -> int:
        return self.grad + self.master + self.low + self.moments


_LAYOUTS = {
    "whole": _Roles(grad=4, master=4, low=0),
    "split": _Roles(grad=2, master=2, low=2),
}


def state_bytes(layout: str) -> int:
    """Bytes of a parameter's state and gradient in host memory."""
    return _LAYOUTS[layout].nbytes


class PartState:
    """One part's state with values as in training, in huge pages where allowed.

    Args:
        core: The native core.
        layout: "whole" (fp32) or "split" (bf16 weights).
        elements: Parameters.
        locking: Page-locks the memory; None leaves it pageable.
    """

    def __init__(
        self, core: Any, *, layout: str, elements: int, locking: PageLocking | None = None
    ) -> None:
        roles = _LAYOUTS[layout]
        self.layout = layout
        self.elements = elements
        self.arena = HostArena(
            roles.nbytes * elements,
            ledger=Ledger({}),
            role=Role.STAGING,
            what="state to be measured",
            page_locking=locking,
        )
        grad_dtype = torch.float32 if layout == "whole" else torch.bfloat16
        self.grad = self.arena.tensor(grad_dtype, offset_bytes=0, elements=elements)
        begin = roles.grad * elements
        self.master = self.arena.tensor(grad_dtype, offset_bytes=begin, elements=elements)
        begin += roles.master * elements
        low = begin
        begin += roles.low * elements
        self.exp_avg = self.arena.tensor(torch.float32, offset_bytes=begin, elements=elements)
        self.exp_avg_sq = self.arena.tensor(
            torch.float32, offset_bytes=begin + 4 * elements, elements=elements
        )
        if locking is not None:
            locking.wait()
        block = torch.empty(_FILLING).uniform_(-1e-2, 1e-2)
        for values in (self.grad, self.master, self.exp_avg):
            _fill(values, block)
        self.exp_avg_sq.fill_(1e-4)
        name = str(grad_dtype).removeprefix("torch.")
        self._part = core.PartState(
            self.grad.data_ptr(),
            name,
            layout,
            self.master.data_ptr(),
            self.arena.address + low if roles.low else 0,
            self.exp_avg.data_ptr(),
            self.exp_avg_sq.data_ptr(),
            0,
            name,
            [(0, elements)],
            elements,
        )
        self._hyper = core.Hyper("decoupled", 0.9999, 0.1, 0.999, 0.001, 1e-8, 0.5, 1e-4)

    @property
    def traffic(self) -> int:
        """Bytes of host memory that one update reads and writes."""
        return BYTES_PER_PARAMETER[self.layout] * self.elements

    def update(self, pool: Any) -> Any:
        """Begin one update; returns its ticket."""
        return pool.update(self._part, [self._hyper], [0], 1.0, _PIECE_ELEMENTS, None, [])

    def close(self) -> None:
        """Give the memory back."""
        self.grad = self.master = self.exp_avg = self.exp_avg_sq = torch.empty(0)
        self.arena.close()


def _fill(values: torch.Tensor, block: torch.Tensor) -> None:
    """Write a block again and again: drawing gigabytes of random numbers takes long."""
    for part in values.split(block.numel()):
        part.copy_(block[: part.numel()])


class Run(NamedTuple):
    """What one run took.

    Attributes:
        seconds: On the clock.
        processor_seconds: Of all threads together; a busy neighbour does not add to it.
    """

    seconds: float
    processor_seconds: float


def timed(work: Callable[[], Any], *, repeats: int) -> list[Run]:
    """Each run after one warm-up."""
    work()
    runs = []
    for _ in range(repeats):
        begin, worked = time.perf_counter(), time.process_time()
        work()
        runs.append(Run(time.perf_counter() - begin, time.process_time() - worked))
    return runs


def update_runs(
    core: Any, part: PartState, *, cpus: Sequence[int], threads: int, repeats: int
) -> list[Run]:
    """The fused pass with a number of threads, one entry a repeat."""
    pool = core.Pool(threads, list(cpus[:threads]))
    try:
        return timed(lambda: part.update(pool).wait(), repeats=repeats)
    finally:
        pool.close()


def copy_runs(core: Any, part: PartState, *, threads: int, repeats: int) -> list[Run]:
    """Copies of one half of the state over the other, `threads` copying at a time.

    It reads and writes `part.arena.nbytes` bytes in all; a copy is the least that a pass over the
    same bytes can do.
    """
    links = [core.Link(core.MemcpyEngine(), [0], 2, -1, f"copy-{i}") for i in range(threads)]
    half = part.arena.nbytes // 2
    bounds = [half * i // threads // 64 * 64 for i in range(threads)] + [half]

    def _copy() -> None:
        tickets = []
        for link, begin, end in zip(links, bounds[:-1], bounds[1:], strict=True):
            plan = core.CopyPlan(PIECE_BYTES)
            address = part.arena.address + begin
            plan.append(address + half, address, end - begin)
            tickets.append(link.copy(plan))
        for ticket in tickets:
            ticket.wait()

    try:
        return timed(_copy, repeats=repeats)
    finally:
        for link in links:
            link.close()


class LinkEnds:
    """Memory at both ends of the device-host link, and its two lanes.

    Args:
        core: The native core.
        accelerator: The device.
        nbytes: Bytes in each direction.
        locking: Page-locks the host's end.
    """

    def __init__(
        self, core: Any, *, accelerator: Accelerator, nbytes: int, locking: PageLocking
    ) -> None:
        self._core = core
        self.nbytes = nbytes
        self._host = HostArena(
            2 * nbytes,
            ledger=Ledger({}),
            role=Role.STAGING,
            what="a link's end to be measured",
            page_locking=locking,
        )
        self._host.tensor(torch.uint8, offset_bytes=0, elements=2 * nbytes).zero_()
        locking.wait()
        device = accelerator.device
        self._device = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        accelerator.synchronize()
        names = ("up", "down")
        self._links = {
            name: core.Link(
                accelerator.copy_engine(core), [accelerator.new_stream()], 2, -1, f"probe-{name}"
            )
            for name in names
        }

    def copy(self, direction: str) -> Any:
        """Begin to copy everything "up" or "down"; returns the ticket."""
        plan = self._core.CopyPlan(PIECE_BYTES)
        if direction == "up":
            plan.append(self._device[0].data_ptr(), self._host.address, self.nbytes)
        else:
            address = self._host.address + self.nbytes
            plan.append(address, self._device[1].data_ptr(), self.nbytes)
        return self._links[direction].copy(plan)

    def close(self) -> None:
        """Stop the lanes and give the memory back."""
        for link in self._links.values():
            link.close()
        self._device.clear()
        self._host.close()


def rate_in_common(groups: Sequence[Sequence[tuple[Any, int]]]) -> list[float]:
    """Bytes per second of several kinds of work while all of them were under way.

    Args:
        groups: For each kind its finished tickets, each with the bytes that its pieces moved
            together.
    """
    pieces = [
        [(*times, nbytes / ticket.pieces) for ticket, nbytes in group for times in ticket.times()]
        for group in groups
    ]
    begin = max(min(p[0] for p in group) for group in pieces)
    end = min(max(p[1] for p in group) for group in pieces)
    if end <= begin:
        return [0.0] * len(groups)
    return [
        sum(_inside(p[0], p[1], begin, end) * p[2] for p in group) / (end - begin) * 1e9
        for group in pieces
    ]


def _inside(begin: int, end: int, first: int, last: int) -> float:
    """The share of [begin, end] that lies in [first, last]."""
    if end <= begin:
        return float(first <= begin <= last)
    return max(0, min(end, last) - max(begin, first)) / (end - begin)


def middle(runs: Sequence[Run]) -> float:
    """Median seconds on the clock."""
    return statistics.median(run.seconds for run in runs)
