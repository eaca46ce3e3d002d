"""How much host memory a plan may use, and whether the machine has begun to swap.

Numbers and refusals only; what was placed is counted by `forebay.tiers.ledger`.
"""

from __future__ import annotations

import resource
import time
import warnings
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from forebay.errors import BudgetError, ForebayWarning
from forebay.hardware.cgroup import memory_limit
from forebay.units_of_measure import format_bytes

__all__ = [
    "HostCeiling",
    "HostLimit",
    "SwapWatch",
    "host_ceiling",
    "locked_memory_limit",
    "memory_available_bytes",
    "memory_total_bytes",
]


class HostLimit(Enum):
    """Which limit is the lowest, in words for a message."""

    CGROUP = "the control group's memory limit"
    """A container or job scheduler set it; past it the kernel kills without a message."""
    HOST_BUDGET = "forebay.host_budget"
    """The user set it."""
    AVAILABLE = "the memory that is available now (MemAvailable)"
    """What the kernel expects to hand out without swapping."""
    NONE = "no known limit"
    """The system tells neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCeiling:
    """The most host memory that a plan may ask for.

    Attributes:
        nbytes: The ceiling; None when nothing limits it.
        limit: What sets it.
        source: The file or key it comes from.
        sharers: Processes that share it; `nbytes` is the part of one.
    """

    nbytes: int | None
    limit: HostLimit
    source: str
    sharers: int = 1

    def require(self, nbytes: int, *, what: str, hint: str | None = None) -> None:
        """Refuse a plan that does not fit; call it before any model memory is touched.

        Args:
            nbytes: What the plan needs in all.
            what: A short noun phrase for the message.
            hint: The nearest setting that fits, where the caller knows one.

        Raises:
            BudgetError: It needs more than the ceiling.
        """
        if self.nbytes is None or nbytes <= self.nbytes:
            return
        raise BudgetError(
            f"cannot place {format_bytes(nbytes)} ({nbytes} bytes) of {what} in host memory: "
            f"{self.limit.value} is {format_bytes(self.nbytes)} ({self.nbytes} bytes, "
            f"{self.source})",
            hint=hint or _HINTS[self.limit],
        )


_HINTS = {
    HostLimit.CGROUP: "raise the container's or job's memory limit, or keep more on the device",
    HostLimit.HOST_BUDGET: "raise forebay.host_budget, or keep more on the device",
    HostLimit.AVAILABLE: "free memory, or set forebay.host_budget if the machine's memory grows "
    "as it is touched",
    HostLimit.NONE: "",
}


def host_ceiling(
    host_budget: int | None = None,
    *,
    sharers: int = 1,
    sys: Path = Path("/sys"),
    proc: Path = Path("/proc"),
) -> HostCeiling:
    """The ceiling for a plan: the lower of the control group's limit and `host_budget`.

    `MemAvailable` takes the place of `host_budget` only where none is given: the memory of some
    virtual machines grows as it is touched, so the user's word outweighs that number.

    Args:
        host_budget: The user's bound in bytes, None when there is none.
        sharers: Processes on this machine that plan as much each; the ceiling is one's part.
        sys: The sysfs root.
        proc: The proc root.

    Example:
        >>> host_ceiling(1 << 20).limit
        <HostLimit.HOST_BUDGET: 'forebay.host_budget'>
    """
    found = []
    group = memory_limit(sys / "fs" / "cgroup", proc=proc)
    if group is not None:
        found.append((group.nbytes, HostLimit.CGROUP, str(group.path)))
    if host_budget is not None:
        found.append((host_budget, HostLimit.HOST_BUDGET, "configuration"))
    else:
        available = memory_available_bytes(proc)
        if available is not None:
            found.append((available, HostLimit.AVAILABLE, str(proc / "meminfo")))
    if not found:
        return HostCeiling(nbytes=None, limit=HostLimit.NONE, source="")
    nbytes, limit, source = min(found, key=lambda one: one[0])
    if sharers > 1:
        source = f"{source}, shared by {sharers} ranks of this machine"
    return HostCeiling(nbytes=nbytes // sharers, limit=limit, source=source, sharers=sharers)


def memory_available_bytes(proc: Path = Path("/proc")) -> int | None:
    """`MemAvailable`; None where the system does not tell."""
    return _field(proc / "meminfo", "MemAvailable:")


def memory_total_bytes(proc: Path = Path("/proc")) -> int | None:
    """`MemTotal`; None where the system does not tell."""
    return _field(proc / "meminfo", "MemTotal:")


def machine_bytes(*, sys: Path = Path("/sys"), proc: Path = Path("/proc")) -> int | None:
    """Host memory that there is at all: the machine's, or its control group's where that is less.

    None where the system tells neither.
    """
    group = memory_limit(sys / "fs" / "cgroup", proc=proc)
    known = [memory_total_bytes(proc), None if group is None else group.nbytes]
    return min((nbytes for nbytes in known if nbytes is not None), default=None)


def locked_memory_limit() -> int | None:
    """Bytes that this process may lock (`ulimit -l`); None when unlimited.

    CUDA locks pages through its driver, which this limit does not bind; it is printed beside a
    refusal.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


class SwapWatch:
    """Warns once when training has begun to wait for swapped memory.

    The sign is both of: pages that the system reads back from swap, and major faults of this
    process. Major faults alone also come from reading a mapped file, swap alone from a neighbour.

    Args:
        proc: The proc root.
    """

    # 4 MiB of 4 KiB pages between two looks: a step that swaps does so by the gigabyte.
    _PAGES = 1024
    # Reading both files takes half a millisecond and more, in which a device may stand idle.
    _SECONDS = 5.0

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last = self._read()
        self._looked = time.monotonic()
        self._warned = False

    def poll(self) -> None:
        """Call it once per step; it looks at the counters every few seconds."""
        if self._warned or self._last is None or time.monotonic() < self._looked + self._SECONDS:
            return
        self._looked = time.monotonic()
        self.look()

    def look(self) -> None:
        """Look at the counters now (two small files are read)."""
        now = self._read()
        if now is None or self._last is None or self._warned:
            return
        swapped, faults = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        if min(swapped, faults) >= self._PAGES:
            self._warned = True
            warnings.warn(
                f"host memory is being swapped: within a few seconds {swapped} pages came back "
                f"from swap and this process waited for {faults} major faults; steps will be "
                "far slower\nhint: lower forebay.host_budget, or free host memory",
                ForebayWarning,
                stacklevel=2,
            )

    def _read(self) -> tuple[int, int] | None:
        """Pages swapped in by the system, and major faults of this process."""
        swapped = _field(self._proc / "vmstat", "pswpin", unit=1)
        try:
            stat = (self._proc / "self" / "stat").read_text(encoding="utf-8", errors="replace")
            # proc(5): the command in parentheses may contain spaces; majflt is field 12, the
            # tenth after it.
            faults = int(stat.rpartition(")")[2].split()[9])
        except (OSError, IndexError, ValueError):
            return None
        return None if swapped is None else (swapped, faults)


def _field(path: Path, name: str, *, unit: int = 1024) -> int | None:
    """The number on the line that begins with a name, times the unit."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        parts = line.split()
        if len(parts) >= 2 and parts[0] == name and parts[1].isdigit():
            return int(parts[1]) * unit
    return None
