"""Cores: which of them this rank's update threads use.

The count comes from the affinity mask, the control group's quota and the number of ranks on this
machine. It never comes from `OMP_NUM_THREADS`, which launchers set to 1. Nothing is bound here:
the native pool pins its own threads, as well as the system lets it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.hardware.cgroup import cpu_quota

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["Core", "CoreShare", "Topology", "allowed_cpus", "parse_cpu_list"]

# With fewer cores than this, threads go on SMT siblings too: so few cores do not saturate memory
# with one thread each, and a 2-CPU virtual machine is often one core with two threads.
_FEW_CORES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """A physical core, as far as this process may use it.

    Attributes:
        cpus: Its logical CPUs (SMT siblings) in the affinity mask, ascending.
        node: Its NUMA node, 0 where the system tells none.
    """

    cpus: tuple[int, ...]
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreShare:
    """What one rank's update threads use.

    Attributes:
        threads: Number of worker threads, at least 1.
        cpus: The logical CPU of each thread, or empty when threads must not be pinned (under a
            CPU quota every container would pick the same ones).
        summary: One line for the start-up report: what is used, what is left idle and why.
    """

    threads: int
    cpus: tuple[int, ...]
    summary: str

    def limited(self, threads: int) -> CoreShare:
        """At least one thread and at most `threads`, spread evenly over the share's cores.

        Example:
            >>> share = CoreShare(threads=4, cpus=(1, 2, 3, 4), summary="4 update threads")
            >>> share.limited(2).cpus
            (1, 3)
            >>> share.limited(9) == share
            True
        """
        if threads >= self.threads:
            return self
        count = max(1, threads)
        cpus = tuple(self.cpus[i * len(self.cpus) // count] for i in range(count) if self.cpus)
        return CoreShare(
            threads=count,
            cpus=cpus,
            summary=f"{count} update thread{'s' if count > 1 else ''} of {self.threads} possible",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The cores that this process may use, ordered by NUMA node, then by number.

    Attributes:
        cores: At least one.
        quota: Processors' worth of time that control groups allow to all ranks together.
    """

    cores: tuple[Core, ...]
    quota: float | None = None

    @classmethod
    def read(
        cls,
        sys: Path = Path("/sys"),
        *,
        proc: Path = Path("/proc"),
        allowed: Callable[[], Collection[int]] | None = None,
    ) -> Topology:
        """Read the machine.

        Args:
            sys: The sysfs root. Whatever is missing under it is assumed simple: one core per
                CPU, one node.
            proc: The proc root, for the process's control groups.
            allowed: What returns the affinity mask; `allowed_cpus` by default.
        """
        mask = frozenset((allowed or allowed_cpus)())
        nodes = _nodes(sys / "devices" / "system" / "node")
        cores: dict[tuple[int, ...], Core] = {}
        for cpu in sorted(mask):
            siblings = _siblings(sys / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology")
            usable = tuple(sorted((siblings | {cpu}) & mask))
            cores.setdefault(usable, Core(cpus=usable, node=nodes.get(cpu, 0)))
        ordered = sorted(cores.values(), key=lambda core: (core.node, core.cpus))
        return cls(cores=tuple(ordered), quota=cpu_quota(sys / "fs" / "cgroup", proc=proc))

    def usable_cores(self) -> int:
        """Cores that all ranks of this machine may use together."""
        quota = len(self.cores) if self.quota is None else max(1, int(self.quota))
        return min(len(self.cores), quota)

    def share(
        self, local_rank: int = 0, *, local_ranks: int = 1, reserve_for_launch: int | None = None
    ) -> CoreShare:
        """The part of one of the ranks that run on this machine with the same affinity mask.

        Cores are cut into runs of almost equal length, so every core belongs to a rank, and with
        a multiple of the node count of ranks each keeps to one node. With more ranks than cores
        several ranks share one.

        Args:
            local_rank: This rank, counted on this machine.
            local_ranks: How many there are.
            reserve_for_launch: Cores left to the thread that launches accelerator work; None
                leaves one where the share has more than two.

        Example:
            >>> cores = tuple(Core(cpus=(cpu,), node=0) for cpu in range(8))
            >>> Topology(cores=cores).share(1, local_ranks=2).cpus
            (5, 6, 7)
        """
        if not 0 <= local_rank < local_ranks:
            raise ValueError(f"local rank {local_rank} of {local_ranks}")
        mine = _cut(self.cores, local_rank, local_ranks)
        own_quota = None if self.quota is None else max(1, int(self.quota / local_ranks))
        usable = len(mine) if own_quota is None else min(len(mine), own_quota)
        reserved = reserve_for_launch
        if reserved is None:
            reserved = 1 if usable > 2 else 0
        # The update always keeps a core, whatever is asked for.
        reserved = max(0, min(reserved, usable - 1))
        cpus = _cpus_of(mine[reserved:], siblings_from=1 if len(mine) < _FEW_CORES else None)
        threads = len(cpus)
        if own_quota is not None and own_quota < sum(len(core.cpus) for core in mine):
            threads, cpus = min(threads, own_quota - reserved), ()
        return CoreShare(
            threads=threads,
            cpus=cpus,
            summary=_summary(mine, threads=threads, cpus=cpus, reserved=reserved),
        )


def allowed_cpus() -> frozenset[int]:
    """The logical CPUs in this process's affinity mask.

    Where the system has no such call or refuses it (some containers do), every CPU that Python
    counts: a thread too many is slower, an error here would end the run.
    """
    try:
        return frozenset(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return frozenset(range(os.cpu_count() or 1))


def parse_cpu_list(text: str) -> frozenset[int]:
    """Read the kernel's list format.

    Example:
        >>> sorted(parse_cpu_list("0-2,8"))
        [0, 1, 2, 8]
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _cut(cores: tuple[Core, ...], rank: int, ranks: int) -> tuple[Core, ...]:
    """One of `ranks` runs of almost equal length that together are all cores."""
    total = len(cores)
    if ranks > total:
        return (cores[rank * total // ranks],)
    return cores[rank * total // ranks : (rank + 1) * total // ranks]


def _cpus_of(cores: tuple[Core, ...], *, siblings_from: int | None) -> tuple[int, ...]:
    """A CPU of every core; then, if asked for, the siblings from that position on."""
    cpus = [core.cpus[0] for core in cores]
    if siblings_from is not None:
        cpus.extend(cpu for core in cores for cpu in core.cpus[siblings_from:])
    return tuple(cpus)


def _summary(mine: tuple[Core, ...], *, threads: int, cpus: tuple[int, ...], reserved: int) -> str:
    idle_siblings = sum(len(core.cpus) for core in mine[reserved:]) - len(cpus)
    parts = [f"{threads} update thread{'s' if threads > 1 else ''} of {len(mine)} cores"]
    if reserved:
        parts.append(f"{reserved} left to the launching thread")
    if not cpus:
        parts.append("not pinned: a control group limits processor time")
    elif idle_siblings:
        parts.append(f"{idle_siblings} SMT siblings idle (one thread saturates a core's share)")
    return ", ".join(parts)


def _siblings(topology: Path) -> frozenset[int]:
    """SMT siblings of a CPU, empty where the system tells none."""
    for name in ("core_cpus_list", "thread_siblings_list"):
        found = _read_list(topology / name)
        if found:
            return found
    return frozenset()


def _nodes(folder: Path) -> dict[int, int]:
    """NUMA node of each CPU."""
    found = {}
    try:
        nodes = sorted(folder.glob("node[0-9]*"))
    except OSError:  # as where the system tells none: memory is then left where it is touched
        return {}
    for node in nodes:
        for cpu in _read_list(node / "cpulist"):
            found[cpu] = int(node.name.removeprefix("node"))
    return found


def _read_list(path: Path) -> frozenset[int]:
    try:
        return parse_cpu_list(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return frozenset()
