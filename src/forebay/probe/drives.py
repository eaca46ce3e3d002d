"""How fast a folder's drive reads and writes past the page cache, with several threads.

It writes one file of its own without a name, reads it back and lets it go. What it finds of the
drive (a network disk, a spinning one) goes into the environment report.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.errors import ConfigError
from forebay.hardware.profile import Drives
from forebay.units_of_measure import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["DriveKind", "drive_kind", "measure_drive"]

# Large enough for a drive's full rate, small enough that several fit into any memory.
_BLOCK_BYTES = 8 << 20
_THREADS = 4
# Past what a drive caches in its own memory.
_FILE_BYTES = 1 << 30
# What a short test may leave free.
_SPARE_BYTES = 1 << 30
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "9p", "fuse.sshfs"})
_MEMORY = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveKind:
    """What lies under a folder.

    Attributes:
        file_system: Its type, as the kernel calls it.
        problem: Why state must not lie there; empty where it may.
    """

    file_system: str
    problem: str = ""


def drive_kind(folder: Path, *, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> DriveKind:
    """Look at what lies under a folder.

    Args:
        folder: An existing folder.
        proc: The proc root.
        sys: The sysfs root.
    """
    place, kind, device = "", "unknown", ""
    here = str(folder.resolve())
    for line in _lines(proc / "self" / "mountinfo"):
        left, _, right = line.partition(" - ")
        fields, more = left.split(), right.split()
        mounted = fields[4] if len(fields) > 4 and more else ""
        inside = here == mounted or here.startswith(mounted.rstrip("/") + "/")
        if mounted and inside and len(mounted) >= len(place):
            place, kind, device = mounted, more[0], fields[2]
    if kind in _NETWORK:
        return DriveKind(file_system=kind, problem="a network disk: every rank waits for it")
    if kind in _MEMORY:
        return DriveKind(file_system=kind, problem="memory, not a drive: it frees nothing")
    rotates = _lines(sys / "dev" / "block" / device / "queue" / "rotational")
    rotates = rotates or _lines(sys / "dev" / "block" / device / ".." / "queue" / "rotational")
    if rotates == ["1"]:
        return DriveKind(file_system=kind, problem="a spinning disk: two orders too slow")
    return DriveKind(file_system=kind)


def measure_drive(folder: Path, *, nbytes: int = _FILE_BYTES) -> Drives:
    """Write and read a file.

    Args:
        folder: On the drive; it must exist.
        nbytes: Size of the file, rounded down to whole blocks.

    Raises:
        ConfigError: The folder is not there, cannot be written, or has no room.
    """
    if not folder.is_dir():
        raise ConfigError(f"--drive {folder} is no folder", hint="make it on the local drive")
    free = shutil.disk_usage(folder).free
    if free < nbytes + _SPARE_BYTES:
        raise ConfigError(
            f"--drive {folder} has {format_bytes(free)} free, and measuring takes "
            f"{format_bytes(nbytes + _SPARE_BYTES)}",
            hint="free some room, or name a folder on another drive",
        )
    blocks = max(1, nbytes // _BLOCK_BYTES)
    try:
        with _file(folder) as handle:
            write = _rate(handle, blocks, os.pwrite)
            os.fsync(handle)
            read = _rate(handle, blocks, _read)
    except OSError as error:
        raise ConfigError(f"--drive {folder} cannot be measured: {error.strerror}") from error
    return Drives(count=1, capacity_bytes=free, read=read, write=write)


@contextlib.contextmanager
def _file(folder: Path) -> Iterator[int]:
    """A file without a name, past the page cache where the file system can."""
    handle, name = tempfile.mkstemp(dir=folder, prefix=".forebay-probe-")
    try:
        with contextlib.suppress(OSError):
            direct = os.open(name, os.O_RDWR | getattr(os, "O_DIRECT", 0))
            os.close(handle)
            handle = direct
        Path(name).unlink()
        yield handle
    finally:
        os.close(handle)
        Path(name).unlink(missing_ok=True)


def _read(handle: int, buffer: mmap.mmap, offset: int) -> int:
    return os.preadv(handle, [buffer], offset)


def _rate(handle: int, blocks: int, move: Callable[[int, mmap.mmap, int], int]) -> float:
    """Bytes per second of all threads together."""

    def work(first: int) -> int:
        moved = 0
        # Anonymous maps begin at a page, as direct transfers want.
        with mmap.mmap(-1, _BLOCK_BYTES) as buffer:
            for block in range(first, blocks, _THREADS):
                moved += move(handle, buffer, block * _BLOCK_BYTES)
        return moved

    began = time.perf_counter()
    with ThreadPoolExecutor(_THREADS) as threads:
        moved = sum(threads.map(work, range(_THREADS)))
    return moved / (time.perf_counter() - began)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
