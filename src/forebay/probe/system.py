"""What the system allows this process: settings that figures depend on, read and not measured."""

from __future__ import annotations

from pathlib import Path

import torch

from forebay.hardware.cgroup import cpu_quota, memory_limit
from forebay.hardware.limits import locked_memory_limit
from forebay.hardware.rates import System
from forebay.links.direct_storage import find_direct_storage

__all__ = ["HUGE_PAGES", "huge_pages", "read_system"]

HUGE_PAGES = Path("kernel") / "mm" / "transparent_hugepage" / "enabled"


def huge_pages(sys: Path = Path("/sys")) -> str:
    """The chosen setting of transparent huge pages; empty where the system tells none."""
    try:
        text = (sys / HUGE_PAGES).read_text(encoding="utf-8")
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def read_system(
    device: torch.device, *, sys: Path = Path("/sys"), proc: Path = Path("/proc")
) -> System:
    """All of it, for a profile.

    Args:
        device: The accelerator.
        sys: The sysfs root.
        proc: The proc root.
    """
    groups = sys / "fs" / "cgroup"
    memory = memory_limit(groups, proc=proc)
    return System(
        huge_pages=huge_pages(sys) or "unknown",
        direct_storage="missing" if find_direct_storage(device).library is None else "works",
        memlock_bytes=locked_memory_limit(),
        memory_limit_bytes=None if memory is None else memory.nbytes,
        processor_limit=cpu_quota(groups, proc=proc),
        torch_threads=torch.get_num_threads(),
    )
