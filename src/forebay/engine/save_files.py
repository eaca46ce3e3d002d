"""Writes the files of one checkpoint: every rank its own, then rank 0 the manifest.

The order is that of `checkpoint.folder`, [Note: order]: rank 0 makes the hidden folder; every rank
writes its tensors into it and makes them durable; when all have, rank 0 writes the manifest and
gives the folder its name. Where one fails all hear of it, and the hidden folder goes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from forebay.checkpoint.folder import CheckpointFolder
from forebay.checkpoint.folder_lock import folder_lock
from forebay.checkpoint.manifest import MANIFEST
from forebay.checkpoint.manifest_json import manifest_bytes
from forebay.checkpoint.portion import Portion, assemble, file_name, portion_name
from forebay.checkpoint.writer import TensorWriter, plan_files
from forebay.engine.save_request import Latest, as_checkpoint_error
from forebay.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from forebay.checkpoint.disk import Disk
    from forebay.checkpoint.sources import Source
    from forebay.checkpoint.writer import Staging
    from forebay.comm.together import Together
    from forebay.engine.save_request import SaveRequest
    from forebay.engine.snapshot import Snapshot

__all__ = ["CheckpointFiles"]


class CheckpointFiles:
    """The files of one save.

    Args:
        request: Where to.
        disk: The file system.
        together: The ranks that save.
    """

    def __init__(self, request: SaveRequest, *, disk: Disk, together: Together) -> None:
        self._request = request
        self._disk = disk
        self._together = together
        self._folder = CheckpointFolder(request.folder, disk=disk)
        self._hidden = self._folder.hidden(request.tag)

    def write(
        self,
        snapshot: Snapshot,
        *,
        staging: Staging,
        on_read: Callable[[Source], None] | None,
    ) -> Path:
        """Write this rank's tensors, and with the others the whole checkpoint.

        Args:
            snapshot: What this rank writes.
            staging: Memory for what cannot be written from where it lies.
            on_read: See `TensorWriter`; state may change after it was called for it.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: This rank or another could not write; earlier ones are as they were.
            RankError: A rank is gone.
        """
        with contextlib.ExitStack() as turn:
            return self._write(snapshot, staging=staging, on_read=on_read, turn=turn)

    def _write(
        self,
        snapshot: Snapshot,
        *,
        staging: Staging,
        on_read: Callable[[Source], None] | None,
        turn: contextlib.ExitStack,
    ) -> Path:
        request, together = self._request, self._together
        what = f"saving checkpoint {request.tag}"

        def _begin() -> None:
            with as_checkpoint_error(request):
                turn.enter_context(folder_lock(request.folder))
                self._folder.begin(request.tag)

        def _tensors() -> Portion:
            with as_checkpoint_error(request):
                portion = self._write_tensors(snapshot, staging=staging, on_read=on_read)
                if on_read is not None:
                    snapshot.check_untouched(None)
                return portion

        def _complete() -> None:
            with as_checkpoint_error(request):
                self._write_manifest(snapshot, portion)

        together.first(_begin, what=what)
        try:
            portion = together.run(_tensors, what=what)
            together.first(_complete, what=what)
        except BaseException:
            if together.is_first:
                with contextlib.suppress(OSError):
                    self._folder.abandon(self._hidden)
            raise
        return request.folder / request.tag

    def _write_tensors(
        self,
        snapshot: Snapshot,
        *,
        staging: Staging,
        on_read: Callable[[Source], None] | None,
    ) -> Portion:
        rank, size = self._together.rank, self._together.size
        if not self._hidden.is_dir():
            raise CheckpointError(
                f"{self._request.folder} is not the folder that rank 0 writes to",
                hint="all ranks save to one folder, on a file system that all their machines share",
            )
        writer = TensorWriter(self._hidden, disk=self._disk, staging=staging, on_read=on_read)
        files = plan_files(snapshot.sources)
        portion = snapshot.portion(
            writer.write(
                [
                    (file_name(index, rank=rank, size=size), sources)
                    for index, sources in enumerate(files)
                ]
            )
        )
        if rank:
            self._write_file(portion_name(rank), portion.as_bytes())
            self._disk.sync_folder(self._hidden)
        return portion

    def _write_manifest(self, snapshot: Snapshot, own: Portion) -> None:
        """On rank 0, once every rank's tensors are durable."""
        request = self._request
        portions = [own]
        for rank in range(1, self._together.size):
            path = self._hidden / portion_name(rank)
            portions.append(Portion.from_bytes(path.read_bytes()))
            self._disk.remove_tree(path)
        manifest = assemble(snapshot.draft, portions)
        self._write_file(MANIFEST, manifest_bytes(manifest))
        self._folder.commit(self._hidden, tag=request.tag)
        if request.latest is Latest.POINT:
            self._folder.point_latest(request.tag)
        if request.keep is not None:
            self._folder.keep_newest(request.keep, tag=request.tag)

    def _write_file(self, name: str, data: bytes) -> None:
        file = self._disk.create(self._hidden / name)
        try:
            self._disk.write(file, memoryview(data), at=0)
            self._disk.sync(file)
        finally:
            self._disk.close(file)
