"""The link between host memory and files: one native queue, on the best backend there is.

It moves spans of a file set; what they hold is its users' business. Every call enqueues and
returns a ticket; errors surface when somebody waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from forebay.errors import ConfigError, UnsupportedError
from forebay.hardware.rates import DriveUse
from forebay.hardware.thread_limit import starting
from forebay.links.busy_time import BusyTime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.links.fake import FileFaultScript

__all__ = ["FileAccess", "FileBackendKind", "FileLink", "Urgency"]

# Of a 4Kn drive.
_SECTOR_BYTES = 4096
# 64 MiB in flight at the default block length; more threads than that help no drive.
_MOST_THREADS = 64


class FileBackendKind(Enum):
    """How blocks reach the kernel."""

    BEST = "best"
    """io_uring where the system has it, threads elsewhere."""
    URING = "io_uring"
    THREADS = "threads"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileAccess:
    """How files are read and written: DeepSpeed's section `aio`.

    Attributes:
        block_bytes: Longest request, a multiple of 4096.
        queue_depth: Requests in flight for each of `parallelism`.
        parallelism: What the depth is multiplied by.
        single_submit: Hand requests over one at a time instead of together.
        overlap_events: Submit while others complete, instead of a queueful at a time.
        backend: How they reach the kernel.
        fault: Scripted delays and faults; None in real life.

    Raises:
        ConfigError: The longest request is no number of sectors.
    """

    block_bytes: int = 1 << 20
    queue_depth: int = 8
    parallelism: int = 1
    single_submit: bool = False
    overlap_events: bool = True
    backend: FileBackendKind = FileBackendKind.BEST
    fault: FileFaultScript | None = None

    def __post_init__(self) -> None:
        if self.block_bytes < _SECTOR_BYTES or self.block_bytes % _SECTOR_BYTES:
            raise ConfigError(
                f"a request of {self.block_bytes} bytes cannot be made past the page cache: its "
                f"length is a multiple of {_SECTOR_BYTES}",
                hint="1MiB serves most drives (forebay probe nvme PATH measures others)",
            )

    @property
    def depth(self) -> int:
        """Requests in flight."""
        return self.queue_depth * self.parallelism


class Urgency(Enum):
    """Which transfer goes first, whenever a block ends; the older one among equals."""

    WAITED_FOR = 0
    """A pass computes once it is there."""
    BULK = 1
    """Read ahead, or written behind."""


class FileLink:
    """Reads and writes of one file set.

    Args:
        core: The native core or its fallback.
        files: The native set.
        access: How.

    Attributes:
        backend: The name of the backend in use.

    Raises:
        UnsupportedError: The backend that was asked for is not there.
        TransferError: The system starts no more threads.
    """

    def __init__(self, core: Any, files: Any, *, access: FileAccess) -> None:
        self._files = files
        self._reading, self._writing = BusyTime(), BusyTime()
        with starting("the file queue"):
            backend, self.backend = _backend(core, access)
        fault = access.fault
        if fault is not None:
            backend = core.ScriptedBackend(
                backend,
                fault.seed,
                fault.max_delay_us,
                fault.fail_at,
                fault.fail_errno,
                fault.short_at,
                fault.short_bytes,
            )
        with starting("the file queue"):
            self._queue = core.FileQueue(
                backend,
                access.depth,
                access.block_bytes,
                access.single_submit,
                access.overlap_events,
                "nvme",
            )

    @property
    def bytes_read(self) -> int:
        """Bytes that have been read so far."""
        return int(self._queue.bytes_read)

    @property
    def bytes_written(self) -> int:
        """Bytes that have been written so far."""
        return int(self._queue.bytes_written)

    @property
    def blocks(self) -> int:
        """Requests that have been made so far."""
        return int(self._queue.blocks)

    @property
    def use(self) -> DriveUse:
        """What it did so far, and for how long."""
        return DriveUse(
            bytes_read=self.bytes_read,
            read_seconds=self._reading.seconds,
            bytes_written=self.bytes_written,
            write_seconds=self._writing.seconds,
        )

    def read(
        self,
        span: tuple[int, int, int],
        *,
        after: Sequence[Any] = (),
        urgency: Urgency = Urgency.BULK,
    ) -> Any:
        """Fill memory: (offset, address, bytes), all multiples of 4096."""
        ticket = self._queue.read(self._files, [span], urgency.value, list(after))
        return self._reading.add(ticket)

    def write(self, span: tuple[int, int, int], *, after: Sequence[Any] = ()) -> Any:
        """Write memory: (offset, address, bytes), all multiples of 4096."""
        ticket = self._queue.write(self._files, [span], Urgency.BULK.value, list(after))
        return self._writing.add(ticket)

    def close(self) -> None:
        """Stop; what is still queued fails. Idempotent."""
        self._queue.close()
        self._files = None


def _backend(core: Any, access: FileAccess) -> tuple[Any, str]:
    if access.backend is not FileBackendKind.THREADS:
        try:
            return core.UringBackend(access.depth), FileBackendKind.URING.value
        except RuntimeError as error:
            if access.backend is FileBackendKind.URING:
                raise UnsupportedError(
                    str(error), hint="threads reach the same bandwidth with more processor time"
                ) from error
    return core.ThreadBackend(min(access.depth, _MOST_THREADS)), FileBackendKind.THREADS.value
