"""Measures a machine into a profile, step by step, in well under two minutes.

Every figure is a median of repeats after a warm-up. The machine should do nothing else
meanwhile; what else runs is measured with it.

[Note: caches of servers] Processors beside GPUs have hundreds of megabytes of cache. Of a state of
half a gigabyte they keep a part from one update to the next: on 16 processors of a Xeon such a
state was updated at 150 to 190 GB/s, one of 7 GB at 137, and so is a model's.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

import forebay
from forebay import native
from forebay.accelerators.select import accelerator_for, device_name
from forebay.hardware.affinity import Topology
from forebay.hardware.limits import host_ceiling, memory_total_bytes
from forebay.hardware.profile import LinkRates, Machine, Node, Profile, ThreadRate
from forebay.probe.device import device_copy, matrix_rates
from forebay.probe.folder import measure_drive
from forebay.probe.layer import layer_rates
from forebay.probe.ranks import is_rank, join_ranks, measure_ranks
from forebay.probe.system import read_system
from forebay.probe.workload import (
    LinkEnds,
    PartState,
    copy_runs,
    middle,
    rate_in_common,
    state_bytes,
    update_runs,
)
from forebay.tiers.page_locking import PageLocking

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from forebay.accelerators.base import Accelerator
    from forebay.hardware.affinity import CoreShare

__all__ = ["Effort", "measure", "measure_all", "thread_counts"]

# Dozens of rounds on any machine, and long enough to pass over a neighbour's moment.
_TOGETHER_SECONDS = 1.0
# Of the state whose update is measured.
_LAYOUT = "split"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured.

    Attributes:
        elements: Parameters of the update; 14 bytes of state each. Far more than caches hold.
        link_bytes: Bytes in each direction of the link.
        repeats: Runs behind each median.
    """

    elements: int = 32 << 20
    link_bytes: int = 512 << 20
    repeats: int = 5

    @classmethod
    def beside(cls, device: torch.device) -> Effort:
        """What a machine with such a device needs; see [Note: caches of servers]."""
        if device.type != "cuda":
            return cls()
        most = _host_bytes() // 8 // state_bytes(_LAYOUT)
        return cls(elements=max(cls().elements, min(256 << 20, most)))


def measure(
    device: torch.device | str | None = None,
    *,
    effort: Effort | None = None,
    progress: Callable[[str], None] = lambda _text: None,
) -> Profile:
    """Measure this machine.

    Args:
        device: The accelerator; None for the current one.
        effort: How much to measure; None for what the machine needs.
        progress: Told what is measured, as it begins.

    Raises:
        UnsupportedError: The device is not there.
    """
    core = native.core()
    accelerator = accelerator_for(device)
    how = effort or Effort.beside(accelerator.device)
    on_gpu = accelerator.device.type == "cuda"
    share = Topology.read().share()
    locking = PageLocking(accelerator.copy_engine(core) if on_gpu else None)
    part = PartState(core, layout=_LAYOUT, elements=how.elements)
    try:
        threads = []
        for count in thread_counts(share.threads):
            progress(f"update and copy with {count} threads")
            threads.append(_threads(core, part, share=share, count=count, repeats=how.repeats))
        progress("both directions of the link, alone, together and beside the update")
        ends = LinkEnds(core, accelerator=accelerator, nbytes=how.link_bytes, locking=locking)
        try:
            link = _link(core, part, ends=ends, share=share)
        finally:
            ends.close()
    finally:
        part.close()
    progress("matrix rates and memory of the device")
    matrix, device_memory = matrix_rates(accelerator), device_copy(accelerator)
    progress("what a layer does beside its matrix products")
    return Profile(
        machine=Machine.read(device_name(accelerator.device)),
        forebay=forebay.__version__,
        kernel_level=core.kernel_level(),
        threads=tuple(threads),
        link=link,
        matrix=matrix,
        device_memory=device_memory,
        layer=layer_rates(accelerator),
        node=this_node(accelerator),
        system=read_system(accelerator.device),
    )


def measure_all(
    device: torch.device | str | None = None,
    *,
    effort: Effort | None = None,
    drive: Path | None = None,
    progress: Callable[[str], None] = lambda _text: None,
) -> Profile | None:
    """Measure this machine, its drive, and under torchrun what ranks reach between each other.

    Args:
        device: The accelerator; None for the current one, of each rank its own.
        effort: How much to measure; None for what the machine needs.
        drive: A folder on the drive that state may live on; None measures none.
        progress: Told what is measured, as it begins.

    Returns:
        The profile; None in ranks other than the first.

    Raises:
        ConfigError: The drive cannot be measured.
        UnsupportedError: The device is not there.
    """
    network = None
    if is_rank():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if device is None and torch.cuda.is_available():
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
        where = accelerator_for(device).device
        rank = join_ranks(where)
        if rank == 0:
            progress("all-gathers between ranks")
        network = measure_ranks(where)
        if rank:
            return None
    drives = None
    if drive is not None:
        progress(f"reading and writing in {drive}")
        drives = measure_drive(drive)
    profile = measure(device, effort=effort, progress=progress)
    return replace(profile, network=network, drives=drives)


def this_node(accelerator: Accelerator) -> Node:
    """Capacities of this machine, as far as this process may use them."""
    topology, memory = Topology.read(), _host_bytes()
    on_gpu = accelerator.device.type == "cuda"
    devices = torch.cuda.device_count() if on_gpu else 1
    device_bytes = memory
    if on_gpu:
        device_bytes = torch.cuda.get_device_properties(accelerator.device).total_memory
    return Node(
        devices=devices,
        cores=len(topology.cores),
        device_bytes=device_bytes,
        host_bytes=memory,
        uplinks=devices,
        numa_nodes=len({core.node for core in topology.cores}),
    )


def _host_bytes() -> int:
    """Host memory that this process may have, as far as the system tells."""
    return host_ceiling(None).nbytes or memory_total_bytes() or 0


def thread_counts(most: int) -> list[int]:
    """1, 2, 4, ... and the most."""
    counts = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [*counts, most]


def _threads(
    core: Any, part: PartState, *, share: CoreShare, count: int, repeats: int
) -> ThreadRate:
    update = update_runs(core, part, cpus=share.cpus, threads=count, repeats=repeats)
    copy = copy_runs(core, part, threads=count, repeats=repeats)
    return ThreadRate(
        threads=count,
        update=part.traffic / middle(update),
        copy=part.arena.nbytes / middle(copy),
    )


def _link(core: Any, part: PartState, *, ends: LinkEnds, share: CoreShare) -> LinkRates:
    kinds: list[Callable[[], tuple[Any, int]]] = [
        lambda: (ends.copy("up"), ends.nbytes),
        lambda: (ends.copy("down"), ends.nbytes),
    ]
    up, down = (_together([kind])[0] for kind in kinds)
    both = sum(_together(kinds))
    pool = core.Pool(share.threads, list(share.cpus))
    try:
        found = _together([*kinds, lambda: (part.update(pool), part.traffic)])
        home = _together([kinds[1], lambda: (part.update(pool), part.traffic)])
    finally:
        pool.close()
    return LinkRates(
        up=up,
        # What is reached beside other work is reached alone: the least of a neighbour's moments.
        down=max(down, home[0]),
        both=both,
        beside_update=found[0] + found[1],
        update_beside=found[2],
        down_beside_update=home[0],
        update_beside_down=home[1],
    )


def _together(kinds: Sequence[Callable[[], tuple[Any, int]]]) -> list[float]:
    """Rates of several kinds of work, two rounds of each queued at any time.

    Kinds differ in speed, so each gets as many rounds as fit into the time; at least one.
    """
    begun = [[begin(), begin()] for begin in kinds]
    end = time.monotonic() + _TOGETHER_SECONDS
    while time.monotonic() < end or not all(tickets[0][0].done for tickets in begun):
        for tickets, begin in zip(begun, kinds, strict=True):
            if tickets[-2][0].done:
                tickets.append(begin())
        time.sleep(1e-3)
    for tickets in begun:
        for ticket, _nbytes in tickets:
            ticket.wait()
    return rate_in_common(begun)
