"""Saves checkpoints of one engine: at once, or beside training.

[Note: asynchronous saving] The caller waits for the barrier alone. Then a thread copies state
into staging, unit by unit in the order of the next update, and other threads write it. A step
waits for a unit only where it would update what has not been copied yet, so its stall is what the
copy (or, with less staging than state, the disk) is behind. The forward and backward in between
read weights and change none.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.folder import CheckpointFolder, check_tag
from forebay.checkpoint.manifest import BLOCK_BYTES, MANIFEST
from forebay.checkpoint.manifest_json import manifest_bytes
from forebay.checkpoint.writer import PIECE_BYTES, Staging, TensorWriter, plan_files
from forebay.engine.masters import refresh_master
from forebay.engine.readers import Readers
from forebay.engine.snapshot import take_snapshot
from forebay.errors import CheckpointError
from forebay.hardware.limits import host_ceiling
from forebay.tiers.ledger import Role as LedgerRole
from forebay.tiers.ledger import Tier
from forebay.units_of_measure import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from forebay.checkpoint.disk import Disk
    from forebay.checkpoint.sources import Source
    from forebay.engine.engine import Engine
    from forebay.engine.snapshot import RunState, Snapshot

__all__ = ["CheckpointSaver", "Latest", "SaveReport", "SaveRequest", "SaveTiming"]

_log = logging.getLogger("forebay")

# One block is filled, four are checked and written, one waits.
_BLOCKS: Final = 6
# One for each thread that writes.
_PIECES: Final = 4


class SaveTiming(Enum):
    """Whether saving ends before it returns."""

    AT_ONCE = "at once"
    BESIDE_TRAINING = "beside training"
    """See [Note: asynchronous saving]."""


class Latest(Enum):
    """Whether `latest` names the new checkpoint."""

    POINT = "point"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Where and how to save.

    Attributes:
        folder: The folder of checkpoints.
        tag: The new one's name.
        latest: Whether `latest` names it.
        keep: Complete checkpoints that stay; None keeps all.
        timing: At once or beside training.
        staging_bytes: Host memory for copies beside training; None for as much as there is room
            for, at most the state's size.
    """

    folder: Path
    tag: str
    latest: Latest = Latest.POINT
    keep: int | None = None
    timing: SaveTiming = SaveTiming.AT_ONCE
    staging_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save took.

    Attributes:
        nbytes: Bytes of tensors.
        seconds: From the call to the last rename.
        stall_seconds: How long training stood still for it.
        path: The checkpoint.
    """

    nbytes: int
    seconds: float
    stall_seconds: float
    path: Path


class CheckpointSaver:
    """Writes checkpoints of one engine, one at a time.

    Not thread-safe: the training thread calls it.

    Args:
        engine: What is saved.
        disk: Where to.

    Attributes:
        last: The last one that was completed, or None.
    """

    def __init__(self, engine: Engine, *, disk: Disk | None = None) -> None:
        self._engine = engine
        self._disk: Disk = RealDisk() if disk is None else disk
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.last: SaveReport | None = None

    def save(self, request: SaveRequest, run: RunState) -> None:
        """Save; legal between any two calls of the engine, and without an effect on training.

        Raises:
            CheckpointError: It cannot be saved, or the one before could not; earlier checkpoints
                are as they were.
            EngineClosedError: The engine failed; its state must not be saved.
        """
        self.wait()
        began = time.monotonic()
        check_tag(request.tag)
        engine = self._engine
        engine.quiesce("save_checkpoint")
        for record in engine.collector.records:
            refresh_master(record)
        snapshot = take_snapshot(engine, run)
        nbytes = sum(source.spec.nbytes for source in snapshot.sources)
        with _as_checkpoint_error(request):
            request.folder.mkdir(parents=True, exist_ok=True)
            _require_room(request.folder, nbytes)
        if request.timing is SaveTiming.AT_ONCE:
            with self._staging(_PIECES * PIECE_BYTES, block_bytes=PIECE_BYTES) as staging:
                path = self._write(snapshot, request, staging=staging, readers=None)
            seconds = time.monotonic() - began
            self.last = SaveReport(nbytes=nbytes, seconds=seconds, stall_seconds=seconds, path=path)
            return
        self._start(snapshot, request, nbytes=nbytes, began=began)

    def _start(
        self, snapshot: Snapshot, request: SaveRequest, *, nbytes: int, began: float
    ) -> None:
        readers = Readers(unit.index for unit in self._engine.units)
        stack = contextlib.ExitStack()
        staging = stack.enter_context(
            self._staging(
                self._room(nbytes) if request.staging_bytes is None else request.staging_bytes
            )
        )
        for unit in self._engine.units:
            for part in unit.parts:
                part.before_change = partial(readers.wait, unit.index)
        stalled = time.monotonic() - began

        def work() -> None:
            try:
                with stack, self._side_stream():
                    path = self._write(snapshot, request, staging=staging, readers=readers)
                self.last = SaveReport(
                    nbytes=nbytes,
                    seconds=time.monotonic() - began,
                    stall_seconds=stalled + readers.waited_seconds,
                    path=path,
                )
            except BaseException as error:
                self._error = error
            finally:
                readers.finish()

        self._thread = threading.Thread(target=work, name="forebay-checkpoint")
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether a save beside training is still going on."""
        return self._thread is not None and self._thread.is_alive()

    def poll(self) -> None:
        """Raise what a save beside training has met, once; waits for nothing.

        Raises:
            CheckpointError: It failed; training may go on.
        """
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for a save beside training.

        Raises:
            CheckpointError: It failed; training may go on.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            for unit in self._engine.units:
                for part in unit.parts:
                    part.before_change = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(
        self,
        snapshot: Snapshot,
        request: SaveRequest,
        *,
        staging: Staging,
        readers: Readers | None,
    ) -> Path:
        folder = CheckpointFolder(request.folder, disk=self._disk)
        with _as_checkpoint_error(request):
            hidden = folder.begin(request.tag)
            try:
                writer = TensorWriter(
                    hidden,
                    disk=self._disk,
                    staging=staging,
                    on_read=None if readers is None else _Progress(snapshot, readers),
                )
                named = [
                    (f"tensors-{index:05d}.safetensors", sources)
                    for index, sources in enumerate(plan_files(snapshot.sources))
                ]
                manifest = snapshot.manifest(writer.write(named))
                if readers is not None:
                    snapshot.check_untouched(None)
                self._write_file(hidden / MANIFEST, manifest_bytes(manifest))
                path = folder.commit(hidden, tag=request.tag)
            except BaseException:
                with contextlib.suppress(OSError):
                    folder.abandon(hidden)
                raise
            if request.latest is Latest.POINT:
                folder.point_latest(request.tag)
            if request.keep is not None:
                folder.keep_newest(request.keep, tag=request.tag)
        return path

    def _write_file(self, path: Path, data: bytes) -> None:
        file = self._disk.create(path)
        try:
            self._disk.write(file, memoryview(data), at=0)
            self._disk.sync(file)
        finally:
            self._disk.close(file)

    @contextlib.contextmanager
    def _staging(self, nbytes: int, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Staging]:
        """Memory for copies, counted in the ledger while it is used."""
        reservation = self._engine.ledger.reserve(
            Tier.HOST, LedgerRole.STAGING, nbytes, what="a checkpoint's blocks"
        )
        try:
            yield Staging(nbytes, block_bytes=block_bytes)
        finally:
            reservation.release()

    def _room(self, nbytes: int) -> int:
        """What a copy of the state may take: half of what is left, at most all of it."""
        budget = self._engine.ledger.budget(Tier.HOST)
        left = host_ceiling(None).nbytes
        bounds = [nbytes + BLOCK_BYTES * _BLOCKS]
        if left is not None:
            bounds.append(left // 2)
        if budget is not None:
            bounds.append((budget - self._engine.ledger.bytes(Tier.HOST)) // 2)
        return max(_BLOCKS * BLOCK_BYTES, min(bounds))

    @contextlib.contextmanager
    def _side_stream(self) -> Iterator[None]:
        """A stream of its own, so that copies do not queue behind the model's kernels.

        The state is complete (the barrier waited for the device), and no update of it starts
        before it is read.
        """
        device = self._engine.accelerator.device
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            yield


class _Progress:
    """Tells readers when the last tensor of a unit was read, and that nobody wrote meanwhile."""

    def __init__(self, snapshot: Snapshot, readers: Readers) -> None:
        self._snapshot = snapshot
        self._readers = readers
        self._left: dict[int, int] = {}
        for source in snapshot.sources:
            if source.owner is not None:
                self._left[source.owner] = self._left.get(source.owner, 0) + 1

    def __call__(self, source: Source) -> None:
        owner = source.owner
        if owner is None:
            return
        self._left[owner] -= 1
        if not self._left[owner]:
            self._snapshot.check_untouched(owner)
            self._readers.done(owner)


def _require_room(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise CheckpointError(
            f"the checkpoint takes {format_bytes(nbytes)}, and {folder} has {format_bytes(free)} "
            "left",
            hint="make room, or keep fewer checkpoints",
        )


@contextlib.contextmanager
def _as_checkpoint_error(request: SaveRequest) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot save checkpoint {request.tag} in {request.folder}: "
            f"{error.strerror or error}; earlier ones are as they were",
        ) from error
