"""The file queue beside fio, in one file with one block length and depth, in turn.

Where fio is not installed, beside a plain loop of direct reads and writes, one at a time.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay import native
from forebay.bench.fio import Fio
from forebay.bench.tables import Table
from forebay.errors import ConfigError, StorageError
from forebay.hardware.storage import storage_of
from forebay.links.host_nvme import FileAccess, FileBackendKind
from forebay.probe.drive import Drive, Moved
from forebay.units_of_measure import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NvmeBench", "NvmeSpec", "bench_nvme"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeSpec:
    """What is moved.

    Attributes:
        path: A folder on the drive.
        nbytes: Of each read and each write, a multiple of the block.
        block_bytes: Of one request.
        depth: Requests in flight.
        rounds: After one that warms up.
    """

    path: Path
    nbytes: int = 1 << 30
    block_bytes: int = 1 << 20
    depth: int = 8
    rounds: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeBench:
    """All rounds: (contestant, action) -> what each took; `notes` say what fio could not do."""

    spec: NvmeSpec
    file_system: str
    rounds: dict[tuple[str, str], list[Moved]]
    notes: tuple[str, ...] = ()

    def table(self) -> Table:
        """Medians over rounds; ratios to the best of fio (or the loop) within a round."""
        names = list(dict.fromkeys(name for name, _ in self.rounds))
        others = [name for name in names if not name.startswith("forebay")]
        rows = []
        for action in ("read", "write"):
            for name in names:
                moved = self.rounds[name, action]
                turns = zip(*(self.rounds[other, action] for other in others), strict=True)
                best = [max(one.rate for one in turn) for turn in turns]
                ratios = [one.rate / most for one, most in zip(moved, best, strict=True)]
                rows.append(
                    (
                        action,
                        name,
                        f"{statistics.median(one.rate for one in moved) / 1e9:.2f}",
                        f"{statistics.median(ratios):.2f}",
                        f"{min(ratios):.2f} - {max(ratios):.2f}",
                        f"{statistics.median(o.cores_per_gigabyte_second for o in moved):.3f}",
                    )
                )
        spec = self.spec
        return Table(
            title="The file queue beside fio" if "fio" in " ".join(others) else "The file queue",
            head=("", "who", "GB/s", "of best other", "low - high", "cores per GB/s"),
            rows=tuple(rows),
            notes=(
                f"Medians of {spec.rounds} rounds in turn after one that warms up; "
                f"{spec.nbytes >> 20} MiB in blocks of {spec.block_bytes >> 10} KiB, {spec.depth} "
                f"in flight, direct access, {self.file_system}.",
                "Cores per GB/s: processor time of the whole process, user and system, per GB.",
                *self.notes,
            ),
        )

    def as_dict(self) -> dict[str, Any]:
        """All numbers."""
        return {
            "device": "cpu",
            "spec": {**asdict(self.spec), "path": str(self.spec.path)},
            "file_system": self.file_system,
            "rounds": [
                {"who": who, "action": action, "runs": [asdict(one) for one in runs]}
                for (who, action), runs in self.rounds.items()
            ],
        }


def bench_nvme(
    spec: NvmeSpec, *, progress: Callable[[str], None] = lambda _text: None
) -> NvmeBench:
    """Measure all contestants in turn, several times.

    Raises:
        StorageError: The folder cannot be used or has no room.
        ConfigError: The sizes do not fit together.
    """
    access = FileAccess(block_bytes=spec.block_bytes, queue_depth=spec.depth)
    if not spec.nbytes or spec.nbytes % spec.block_bytes or spec.nbytes % (1 << 20):
        raise ConfigError(
            f"{spec.nbytes} bytes are no whole number of blocks and MiB: a block has "
            f"{spec.block_bytes} bytes",
            hint="take 1GiB in blocks of 1MiB",
        )
    fio = shutil.which("fio")
    drive = Drive(spec.path, nbytes=spec.nbytes, core=native.core())
    loop = None
    contestants: dict[str, Callable[[str], Moved]] = {
        f"forebay {kind.value}": _queue(drive, spec, replace(access, backend=kind))
        for kind in (FileBackendKind.URING, FileBackendKind.THREADS)
    }
    jobs = None if fio is None else Fio(fio, spec=spec)
    if jobs is not None and jobs.engines:
        contestants |= {f"fio {engine}": partial(jobs.move, engine) for engine in jobs.engines}
    else:
        loop = _Loop(spec)
        contestants["a loop"] = loop.move
    rounds: dict[tuple[str, str], list[Moved]] = {}
    try:
        for number in range(spec.rounds + 1):
            progress(f"round {number} of {spec.rounds}, {', '.join(contestants)}")
            for action in ("write", "read"):
                for name, move in contestants.items():
                    moved = move(action)
                    if number:
                        rounds.setdefault((name, action), []).append(moved)
    finally:
        drive.close()
        if loop is not None:
            loop.close()
    storage = storage_of(spec.path)
    return NvmeBench(
        spec=spec,
        file_system=f"{storage.kind} on {storage.source}",
        rounds=rounds,
        notes=(*([] if jobs is None else jobs.notes), *storage.faults()),
    )


def _queue(drive: Drive, spec: NvmeSpec, access: FileAccess) -> Callable[[str], Moved]:
    return lambda action: drive.move(action, access, nbytes=spec.nbytes)


class _Loop:
    """Direct reads and writes of 8 MiB, one at a time."""

    _BLOCK = 8 << 20

    def __init__(self, spec: NvmeSpec) -> None:
        self._nbytes = spec.nbytes
        self._memory = memoryview(mmap.mmap(-1, self._BLOCK))
        self._memory[:] = os.urandom(self._BLOCK)
        try:
            self._file = os.open(spec.path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
            os.posix_fallocate(self._file, 0, spec.nbytes)
        except OSError as error:
            raise StorageError(
                f"a loop cannot have {format_bytes(spec.nbytes)} of its own in {spec.path}: "
                f"{error.strerror} (errno {error.errno})",
                hint="install fio, which reads and writes the queue's own file",
            ) from error

    def move(self, action: str) -> Moved:
        """All of it, in order."""
        transfer = os.preadv if action == "read" else os.pwritev
        began, cpu = time.perf_counter(), time.process_time()
        for at in range(0, self._nbytes, self._BLOCK):
            size = min(self._BLOCK, self._nbytes - at)
            if transfer(self._file, [self._memory[:size]], at) != size:
                raise OSError(f"the drive transferred less than {size} bytes")
        return Moved(
            nbytes=self._nbytes,
            seconds=time.perf_counter() - began,
            cpu_seconds=time.process_time() - cpu,
            backend="loop",
        )

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)
