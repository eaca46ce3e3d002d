"""Saves checkpoints of one engine: at once, or beside training.

[Note: asynchronous saving] The caller waits for the barrier alone. Then a thread copies state
into staging, unit by unit in the order of the next update, and other threads write it. A step
waits for a unit only where it would update what has not been copied yet, so its stall is what the
copy (or, with less staging than state, the disk) is behind. The forward and backward in between
read weights and change none.

Over several ranks every one writes what it alone answers for (see `engine.save_files`), and the
first step waits for all of them at once (see `engine.readers`, [Note: ranks meet]).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.folder import check_tag
from forebay.checkpoint.manifest import BLOCK_BYTES
from forebay.checkpoint.writer import PIECE_BYTES, Staging
from forebay.comm.together import Together
from forebay.engine.masters import refresh_master
from forebay.engine.readers import Readers
from forebay.engine.save_files import CheckpointFiles
from forebay.engine.save_request import (
    LEAST_SAVE_BYTES,
    SaveReport,
    SaveRequest,
    SaveTiming,
    as_checkpoint_error,
)
from forebay.engine.snapshot import take_snapshot
from forebay.errors import CheckpointError
from forebay.hardware.limits import host_ceiling
from forebay.tiers.ledger import Role as LedgerRole
from forebay.tiers.ledger import Tier
from forebay.units_of_measure import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from forebay.checkpoint.disk import Disk
    from forebay.checkpoint.sources import Source
    from forebay.engine.engine import Engine
    from forebay.engine.snapshot import RunState, Snapshot

__all__ = ["CheckpointSaver"]

# One block is filled, four are checked and written, one waits.
_BLOCKS: Final = 6
# One for each thread that writes.
_PIECES: Final = 4


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
        group = engine.options.group
        self._together = Together.of(group, "saving", otherwise=CheckpointError)
        # The training thread's own, beside a thread that saves.
        self._meeting = Together.of(group, "copying", otherwise=CheckpointError)
        self._readers: Readers | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.last: SaveReport | None = None

    def save(self, request: SaveRequest, run: RunState) -> None:
        """Save; legal between any two calls of the engine, and without an effect on training.

        Raises:
            CheckpointError: It cannot be saved, or the one before could not; earlier checkpoints
                are as they were.
            EngineClosedError: The engine failed; its state must not be saved.
            RankError: A rank is gone, or has not come to save too.
        """
        self.wait()
        began = time.monotonic()
        what = f"saving checkpoint {request.tag}"
        # Those before it have ended on all ranks alike.
        self._together.arrive(what=what)
        snapshot = self._together.run(partial(self._prepare, request, run), what=what)
        own = sum(source.spec.nbytes for source in snapshot.sources)
        nbytes = self._agree(request, run, own)
        room = partial(_require_room, request.folder, nbytes)
        self._together.first(room, what=what)
        if request.timing is SaveTiming.AT_ONCE:
            piece = self._piece_bytes()
            with self._staging(_PIECES * piece, block_bytes=piece) as staging:
                path = self._write(snapshot, request, staging=staging, readers=None)
            seconds = time.monotonic() - began
            self.last = SaveReport(nbytes=nbytes, seconds=seconds, stall_seconds=seconds, path=path)
            return
        with contextlib.ExitStack() as stack:
            beside = self._staging(self._staging_bytes(request, own))
            staging = self._together.run(partial(stack.enter_context, beside), what=what)
            kept = stack.pop_all()
        self._start(partial(self._write, snapshot, request, staging=staging), kept, nbytes, began)

    def _prepare(self, request: SaveRequest, run: RunState) -> Snapshot:
        check_tag(request.tag)
        engine = self._engine
        self._await_other_savers()
        engine.quiesce("save_checkpoint")
        for record in engine.collector.records:
            refresh_master(record)
        with as_checkpoint_error(request):
            request.folder.mkdir(parents=True, exist_ok=True)
        return take_snapshot(engine, run)

    def _await_other_savers(self) -> None:
        """One save at a time: two savers of one engine take turns."""
        for unit in self._engine.units:
            for part in unit.parts:
                if part.reading is not None:
                    part.reading.readers.await_end()

    def _agree(self, request: SaveRequest, run: RunState, own: int) -> int:
        """How many bytes all ranks save; they save the same checkpoint."""
        frozen = "without frozen" if run.excludes_frozen else "with frozen"
        asked = [request.tag, request.latest.value, request.keep, request.timing.value, frozen]
        texts = self._together.tell(json.dumps([asked, own]), what="saving a checkpoint")
        told = [json.loads(text) for text in texts]
        for rank, (other, _) in enumerate(told):
            if other != told[0][0]:
                raise CheckpointError(
                    f"rank {rank} saves a checkpoint with {other} (tag, latest, keep, timing, "
                    f"parameters), rank 0 with {told[0][0]}",
                    hint="every rank saves at the same point, under the same tag",
                )
        return sum(row[1] for row in told)

    def _start(
        self,
        write: Callable[..., Path],
        staging: contextlib.ExitStack,
        nbytes: int,
        began: float,
    ) -> None:
        readers = self._make_readers()
        stalled = time.monotonic() - began

        def work() -> None:
            try:
                with staging, self._side_stream():
                    path = write(readers=readers)
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

    def _make_readers(self) -> Readers:
        engine, group = self._engine, self._engine.options.group
        readers = Readers(
            (unit.index for unit in engine.units),
            together=self._meeting,
            check=_alone if group is None else group.check,
        )
        for unit in engine.units:
            for part in unit.parts:
                part.reading = readers.of(unit.index)
        if self._meeting.size > 1:
            engine._barrier.readers = readers
        self._readers = readers
        return readers

    @property
    def is_writing(self) -> bool:
        """Whether a save beside training is still going on."""
        return self._thread is not None and self._thread.is_alive()

    def poll(self) -> None:
        """Raise what a save beside training has met, once; waits for nothing.

        Over several ranks `wait` alone raises it, where all of them do.

        Raises:
            CheckpointError: It failed; training may go on.
        """
        if self._together.size == 1 and self._thread is not None and not self._thread.is_alive():
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
                    if part.reading is not None and part.reading.readers is self._readers:
                        part.reading = None
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
        files = CheckpointFiles(request, disk=self._disk, together=self._together)
        return files.write(
            snapshot,
            staging=staging,
            on_read=None if readers is None else _Progress(snapshot, readers),
        )

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

    def _piece_bytes(self) -> int:
        """What each writing thread copies at a time: less where the budget has little left.

        The planner leaves as much as the least takes, so that a run never ends with its first
        checkpoint.
        """
        budget = self._engine.ledger.budget(Tier.HOST)
        if budget is None:
            return PIECE_BYTES
        least = LEAST_SAVE_BYTES // _PIECES
        share = (budget - self._engine.ledger.bytes(Tier.HOST)) // _PIECES
        return max(least, min(PIECE_BYTES, share // least * least))

    def _staging_bytes(self, request: SaveRequest, nbytes: int) -> int:
        """For a copy of so many bytes: what was asked for, or all, or half of what is left.

        With little left some blocks may take all of it; one block is the least.
        """
        if request.staging_bytes is not None:
            return max(BLOCK_BYTES, request.staging_bytes)
        some = _BLOCKS * BLOCK_BYTES
        group = self._engine.options.group
        budget = self._engine.ledger.budget(Tier.HOST)
        ceiling = host_ceiling(None).nbytes
        left = []
        if ceiling is not None:
            left.append(ceiling // (1 if group is None else group.local_size))
        if budget is not None:
            left.append(budget - self._engine.ledger.bytes(Tier.HOST))
        bounds = [nbytes + some, *(max(room // 2, min(room, some)) for room in left)]
        return max(BLOCK_BYTES, min(bounds))

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


def _alone() -> None:
    """There is no other rank that could be gone."""


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
