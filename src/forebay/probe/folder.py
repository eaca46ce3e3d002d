"""`forebay probe nvme`: block lengths and queue depths on one path, and what to write in `aio`."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from forebay import native
from forebay.accelerators.select import default_device
from forebay.errors import ConfigError, StorageError
from forebay.hardware.rates import Drives
from forebay.hardware.storage import Storage, storage_of
from forebay.links.direct_storage import DirectStorage, find_direct_storage
from forebay.links.host_nvme import FileAccess
from forebay.probe.drive import Drive
from forebay.tiers.nvme import prove_folder
from forebay.units_of_measure import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["DriveProbe", "Setting", "both_at_once", "measure_drive", "probe_drive"]

_BLOCKS: Final = (256 << 10, 1 << 20, 4 << 20, 8 << 20)
_DEPTHS: Final = (1, 4, 8, 32)
# Nearly as fast is as good, with less in flight: a waited-for block then waits less.
_NEARLY: Final = 0.95
_MIB: Final = 1 << 20
# Past what a drive caches in its own memory.
_FILE_BYTES: Final = 1 << 30
_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting's rates, bytes per second."""

    block_bytes: int
    depth: int
    read: float
    write: float

    @property
    def round_trip(self) -> float:
        """Bytes per second of state that is read and written once each."""
        return 1 / (1 / self.read + 1 / self.write)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveProbe:
    """What was found on a path.

    Attributes:
        path: The folder.
        storage: What it lies on.
        backend: What carried the blocks.
        is_direct: Whether the page cache was passed by.
        written_bytes: What the measurement wrote.
        settings: All of them, in the order of the sweep.
        direct: Whether files can be read into device memory directly.
    """

    path: Path
    storage: Storage
    backend: str
    is_direct: bool
    written_bytes: int
    settings: tuple[Setting, ...]
    direct: DirectStorage

    @property
    def best(self) -> Setting:
        """The setting with the least in flight among those that are nearly the fastest."""
        most = max(one.round_trip for one in self.settings)
        near = [one for one in self.settings if one.round_trip >= _NEARLY * most]
        return min(near, key=lambda one: (one.block_bytes * one.depth, one.block_bytes))

    @property
    def aio(self) -> dict[str, Any]:
        """The section `aio` to write."""
        best = self.best
        return {
            "block_size": best.block_bytes,
            "queue_depth": best.depth,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        }

    def warnings(self) -> list[str]:
        """What speaks against the path."""
        found = self.storage.warnings()
        if not self.is_direct:
            found.append("there is no direct access here: these rates are the page cache's")
        return found

    def as_dict(self) -> dict[str, Any]:
        """All numbers."""
        return {
            "path": str(self.path),
            "file_system": self.storage.kind,
            "source": self.storage.source,
            "backend": self.backend,
            "is_direct": self.is_direct,
            "direct_storage": {
                "used": self.direct.library is not None,
                "reason": self.direct.reason,
            },
            "written_bytes": self.written_bytes,
            "warnings": self.warnings(),
            "settings": [
                {
                    "block_size": one.block_bytes,
                    "queue_depth": one.depth,
                    "read": one.read,
                    "write": one.write,
                }
                for one in self.settings
            ],
            "aio": self.aio,
        }


def probe_drive(
    path: Path, *, most_bytes: int, progress: Callable[[str], None] = lambda _text: None
) -> DriveProbe:
    """Measure a path.

    Args:
        path: A folder.
        most_bytes: What may be written in all: drives wear.
        progress: Told of each setting, with what is left to do.

    Raises:
        StorageError: The folder cannot be used or has no room.
        ConfigError: So few bytes measure nothing.
    """
    combinations = [(block, depth) for block in _BLOCKS for depth in _DEPTHS]
    # one write of the whole file, so that reads bring data, then one for each setting
    share = most_bytes // (len(combinations) + 1) // _MIB * _MIB
    if share < 8 * _MIB:
        raise ConfigError(
            f"{format_bytes(most_bytes)} are too few for {len(combinations)} settings",
            hint=f"allow {format_bytes(8 * _MIB * (len(combinations) + 1))} or more",
        )
    prove_folder(path, nbytes=0)
    if (left := storage_of(path).free_bytes) < share:
        raise StorageError(
            f"the measurement takes {format_bytes(share)} in {path}, which has "
            f"{format_bytes(left)} left",
            hint="lower --most: a seventeenth of it is there at a time",
        )
    drive = Drive(path, nbytes=share, core=native.core())
    written, settings, backend = 0, [], ""
    try:
        progress(f"writing {format_bytes(share)} to {path} ({storage_of(path).kind})")
        written += drive.move("write", FileAccess(), nbytes=share).nbytes
        for number, (block, depth) in enumerate(combinations, start=1):
            progress(
                f"{number} of {len(combinations)}: blocks of {format_bytes(block)}, {depth} in "
                "flight"
            )
            access = FileAccess(block_bytes=block, queue_depth=depth)
            wrote = drive.move("write", access, nbytes=share)
            read = drive.move("read", access, nbytes=share)
            written, backend = written + wrote.nbytes, wrote.backend
            settings.append(
                Setting(block_bytes=block, depth=depth, read=read.rate, write=wrote.rate)
            )
    finally:
        drive.close()
    return DriveProbe(
        path=path,
        storage=storage_of(path),
        backend=backend,
        is_direct=drive.is_direct,
        written_bytes=written,
        settings=tuple(settings),
        direct=find_direct_storage(default_device()),
    )


def measure_drive(folder: Path, *, nbytes: int = _FILE_BYTES) -> Drives:
    """Write a file on a drive and read it, for a profile; nothing is left there.

    Args:
        folder: On the drive; it must exist.
        nbytes: Size of the file, a multiple of 1 MiB.

    Raises:
        ConfigError: The folder is not there.
        StorageError: The folder cannot be used or has no room.
    """
    if not folder.is_dir():
        raise ConfigError(f"--drive {folder} is no folder", hint="make it on the local drive")
    free = storage_of(folder).free_bytes
    if free < nbytes:
        raise StorageError(
            f"the measurement takes {format_bytes(nbytes)} in {folder}, which has "
            f"{format_bytes(free)} left",
            hint="make room, or name a folder on another drive",
        )
    drive = Drive(folder, nbytes=nbytes, core=native.core())
    write, read, each = [], [], []
    try:
        # In turn: a drive that others share changes from second to second.
        for _ in range(_ROUNDS):
            write.append(drive.move("write", FileAccess(), nbytes=nbytes).rate)
            read.append(drive.move("read", FileAccess(), nbytes=nbytes).rate)
            each.append(drive.exchange(FileAccess()))
    finally:
        drive.close()
    read_rate, write_rate, exchanged = (statistics.median(rates) for rates in (read, write, each))
    return Drives(
        count=1,
        capacity_bytes=free,
        read=read_rate,
        write=write_rate,
        both=both_at_once(read=read_rate, write=write_rate, exchanged=exchanged),
    )


def both_at_once(*, read: float, write: float, exchanged: float) -> float:
    """Reads and writes at once, together, such that a forecast of the exchange takes as long.

    An exchange moves as much in either direction, so the slower one bounds it, with a drive's
    bandwidth to spare. The planner slows both down in proportion, and lets the slower go on alone
    once the faster has ended: of one byte each way that takes 1/(s fast) + (1 - slow/fast)/slow
    seconds, which is solved for the share s.

    Args:
        read: Bytes per second, alone.
        write: Bytes per second, alone.
        exchanged: Bytes per second in each direction while as much is read as is written.

    Example:
        >>> both_at_once(read=6.0, write=2.0, exchanged=2.0)  # neither slows the other down
        8.0
        >>> both_at_once(read=6.0, write=2.0, exchanged=1.5)  # one after the other
        4.0
    """
    slow, fast = sorted((read, write))
    # More at once than alone is a neighbour's moment.
    waited = max(0.0, 1 / exchanged - 1 / slow)
    return (read + write) / (1 + fast * waited)
