"""Control groups, version 1 and 2: the limits that a container puts on this process.

A limit of any ancestor binds, so each reader walks from the process's own group up to the root
and keeps the smallest. Inside a container the path in `/proc/self/cgroup` is often that of the
host and is not visible; the walk then ends at the mounted root, which is the container's group.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CgroupLimit", "cpu_quota", "memory_limit"]

# Version 1 spells "no limit" as the largest page-aligned 63-bit number. No machine has 4 EiB.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupLimit:
    """A limit and the file that sets it.

    Attributes:
        nbytes: The limit in bytes.
        path: The file it was read from, for messages.
    """

    nbytes: int
    path: Path


def memory_limit(
    root: Path = Path("/sys/fs/cgroup"), *, proc: Path = Path("/proc")
) -> CgroupLimit | None:
    """The smallest memory limit of this process's groups; None where there is none.

    `memory.high` counts as a limit: above it the kernel stalls every allocation to reclaim, and
    optimizer state cannot be reclaimed.
    """
    found = [
        CgroupLimit(nbytes=value, path=folder / name)
        for folder, names in _folders(
            root,
            proc=proc,
            controller="memory",
            files=("memory.max", "memory.high"),
            files_v1=("memory.limit_in_bytes",),
        )
        for name in names
        if (value := _integer(folder / name)) is not None and value < _NO_LIMIT
    ]
    return min(found, key=lambda limit: limit.nbytes, default=None)


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), *, proc: Path = Path("/proc")) -> float | None:
    """Processors' worth of time that the groups allow (`docker run --cpus`); None if unlimited."""
    found = []
    for folder, names in _folders(
        root, proc=proc, controller="cpu", files=("cpu.max",), files_v1=("cpu.cfs_quota_us",)
    ):
        if "cpu.max" in names:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _folders(
    root: Path,
    *,
    proc: Path,
    controller: str,
    files: tuple[str, ...],
    files_v1: tuple[str, ...],
) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Each existing folder of the process's groups, with the names of limit files to read there."""
    paths = _group_paths(proc, controller)
    mounts = (
        (root, "", files),
        (root / "unified", "", files),
        (root / controller, controller, files_v1),
        (root / "cpu,cpuacct", controller, files_v1),
    )
    for mount, key, names in mounts:
        if not mount.is_dir():
            continue
        relative = Path(paths.get(key, "/").lstrip("/"))
        for step in (relative, *relative.parents):
            # A group outside the namespace shows as "/../x"; only the mount itself is visible.
            if ".." not in step.parts and (mount / step).is_dir():
                yield mount / step, names


def _group_paths(proc: Path, controller: str) -> dict[str, str]:
    """The process's group by controller; the key "" is version 2."""
    paths = {}
    for line in _text(proc / "self" / "cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for name in parts[1].split(","):
                if name in {"", controller}:
                    paths[name] = parts[2]
    return paths


def _integer(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    """A file's stripped text, empty when it is absent or unreadable."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
