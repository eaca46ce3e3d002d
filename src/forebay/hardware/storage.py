"""What a folder lies on, from `/proc` and `/sys`: file system, drive, and what speaks against it.

It reads and measures nothing on the drive.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Storage", "storage_of"]

_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "lustre", "gpfs", "beegfs"}
_MEMORY = {"tmpfs", "ramfs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A folder's file system.

    Attributes:
        kind: Its type, as ext4.
        source: What is mounted, as /dev/nvme0n1.
        free_bytes: What an ordinary user may still take.
        is_rotating: Whether the drive turns; None where the system does not say.
    """

    kind: str
    source: str
    free_bytes: int
    is_rotating: bool | None

    def warnings(self) -> list[str]:
        """What makes this a bad place for training state, one sentence each."""
        found = self.faults()
        if self.is_rotating:
            found.append(
                f"{self.source} says that it rotates: a disk reaches a twentieth of a drive's "
                "bandwidth (virtual disks say so too, and may be fast: measure)"
            )
        return found

    def faults(self) -> list[str]:
        """Why this is no local drive, one sentence each."""
        found = []
        if self.kind in _MEMORY:
            found.append(f"{self.kind} is host memory: state there saves none")
        if self.kind in _NETWORK or self.kind.startswith("fuse"):
            found.append(
                f"{self.kind} is a network or user-space file system: every step would wait for "
                "it, and everybody on it for you"
            )
        if self.kind in {"overlay", "aufs"}:
            found.append(
                f"{self.kind} is a container's own layer: mount a folder of a local drive instead"
            )
        return found


def storage_of(path: Path, *, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Storage:
    """Look at the file system of a folder.

    Args:
        path: A folder that exists.
        proc: The proc root.
        sys: The sysfs root.
    """
    kind, source = _mount(path.resolve(), proc / "self" / "mountinfo")
    status = os.statvfs(path)
    device = path.stat().st_dev
    return Storage(
        kind=kind,
        source=source,
        free_bytes=status.f_bavail * status.f_frsize,
        is_rotating=_rotates(sys / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}"),
    )


def _mount(path: Path, mountinfo: Path) -> tuple[str, str]:
    """Type and source of the mount that holds a path: the longest mount point above it."""
    best = ("", "unknown", "unknown")
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return best[1:]
    for line in lines:
        # proc(5): id parent major:minor root mount-point options ... - type source options
        head, _, tail = line.partition(" - ")
        fields, rest = head.split(), tail.split()
        if len(fields) < 5 or len(rest) < 2:
            continue
        point = fields[4].encode().decode("unicode_escape")
        if path.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, rest[0], rest[1])
    return best[1:]


def _rotates(block: Path) -> bool | None:
    """A partition has no queue of its own: its drive, one folder up, has."""
    for place in (block / "queue", block / ".." / "queue"):
        try:
            return (place / "rotational").read_text(encoding="utf-8").strip() == "1"
        except OSError:
            continue
    return None
