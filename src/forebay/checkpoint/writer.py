"""Writes tensors into files by blocks: a few threads read state, check it and write.

Memory is bounded by the staging that it is given. It decides nothing about names or order.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from forebay.checkpoint.checksum import Checksum
from forebay.checkpoint.disk import FILE_ALIGNMENT, is_aligned
from forebay.checkpoint.header import TensorSpec, build_header
from forebay.checkpoint.manifest import BLOCK_BYTES, FileEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from forebay.checkpoint.disk import Disk
    from forebay.checkpoint.sources import Source

__all__ = ["FILE_BYTES", "PIECE_BYTES", "Staging", "TensorWriter", "Written", "plan_files"]

# Large enough that opening one costs nothing, small enough to copy and to read in parallel.
FILE_BYTES: Final = 4 << 30
# Of what is joined, rounded or read for a save that is waited for: a few pieces stay in the cache,
# and a disk takes them as fast as blocks.
PIECE_BYTES: Final = 2 << 20
# Direct writes wait for the disk: four keep its queue full, and hardly take a core's time.
_THREADS: Final = 4


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a set of tensors.

    Attributes:
        files: The files, in order.
        places: By key: the file's name, and the block checksums.
    """

    files: tuple[FileEntry, ...]
    places: dict[str, tuple[str, tuple[int, ...]]]


class Staging:
    """Memory that is lent to whoever fills it and comes back once written. Thread-safe.

    Blocks are mappings; full ones are used again. Small tensors, of which there may be thousands,
    take their own bytes alone.

    Args:
        capacity: Bytes that may be lent at once, at least a block.
        block_bytes: Of a full block.

    Attributes:
        block_bytes: The same.
    """

    def __init__(self, capacity: int, *, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self._left = max(capacity, block_bytes)
        self._blocks: list[memoryview] = []
        self._changed = threading.Condition()
        self._stopped = False

    def take(self, nbytes: int) -> memoryview | None:
        """Memory of at least so many bytes, as soon as there is some; None after `stop`."""
        size = self.block_bytes if nbytes > self.block_bytes // 2 else nbytes
        with self._changed:
            self._changed.wait_for(lambda: self._left >= size or self._stopped)
            if self._stopped:
                return None
            if size == self.block_bytes and self._blocks:
                self._left -= size
                return self._blocks.pop()
            if self._left - len(self._blocks) * self.block_bytes < size:
                self._blocks.pop()  # blocks that wait to be used again are memory too
            self._left -= size
        return _memory(size)

    def give(self, block: memoryview) -> None:
        """Hand memory back."""
        with self._changed:
            self._left += len(block)
            if len(block) == self.block_bytes:
                self._blocks.append(block)
            self._changed.notify_all()

    def stop(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def _memory(nbytes: int) -> memoryview:
    if nbytes < mmap.PAGESIZE:
        return memoryview(bytearray(nbytes))
    mapping = mmap.mmap(-1, nbytes)
    with contextlib.suppress(OSError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)


def plan_files(sources: Iterable[Source], *, file_bytes: int = FILE_BYTES) -> list[list[Source]]:
    """Cut a list of tensors into files of at most so many bytes, or one tensor each."""
    files: list[list[Source]] = [[]]
    size = 0
    for source in sources:
        if files[-1] and size + source.spec.nbytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append(source)
        size += source.spec.nbytes
    return files


@dataclass(slots=True)
class _File:
    descriptor: int
    left: int = 1
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin_part(self) -> None:
        """There is one part more to write."""
        with self.lock:
            self.left += 1

    def is_last(self) -> bool:
        """One part of the file is done; whether it was the last."""
        with self.lock:
            self.left -= 1
            return self.left == 0


@dataclass(frozen=True, slots=True)
class _Block:
    """Up to `BLOCK_BYTES` of a tensor that begins at `at` in its file, and where its sum goes."""

    source: Source
    index: int
    at: int
    file: _File
    sums: list[int]

    @property
    def begin(self) -> int:
        return self.index * BLOCK_BYTES

    @property
    def end(self) -> int:
        return min(self.begin + BLOCK_BYTES, self.source.spec.nbytes)


class TensorWriter:
    """Writes files of tensors.

    Args:
        folder: Where to.
        disk: The file system.
        staging: Memory for what cannot be written from where it lies.
        on_read: Called by the thread that calls `write` once a tensor's bytes were all read. With
            it everything is copied into staging first, in order, as early as there is room.
        metadata: For each file's header.
    """

    def __init__(
        self,
        folder: Path,
        *,
        disk: Disk,
        staging: Staging,
        on_read: Callable[[Source], None] | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._disk = disk
        self._staging = staging
        self._on_read = on_read
        self._metadata = metadata
        self._error: BaseException | None = None
        self._open: dict[int, _File] = {}
        # What is not copied first must not queue up without bound either.
        self._queued = threading.Semaphore(2 * _THREADS)

    def write(self, files: Sequence[tuple[str, Sequence[Source]]]) -> Written:
        """Write files and make their bytes durable.

        Raises:
            OSError: The file system's first error; everything is closed.
        """
        entries: list[FileEntry] = []
        sums: dict[str, tuple[str, list[int]]] = {}
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="forebay-save") as pool:
            try:
                for name, sources in files:
                    entries.append(self._file(name, sources, pool=pool, sums=sums))
            except BaseException as error:
                self._fail(error)
        for file in self._open.values():
            self._disk.close(file.descriptor)
        if self._error is not None:
            raise self._error
        return Written(
            tuple(entries), {key: (name, tuple(found)) for key, (name, found) in sums.items()}
        )

    def _file(
        self,
        name: str,
        sources: Sequence[Source],
        *,
        pool: ThreadPoolExecutor,
        sums: dict[str, tuple[str, list[int]]],
    ) -> FileEntry:
        ordered = sorted(sources, key=lambda source: _place(source.spec))
        head, begins = build_header(
            [source.spec for source in ordered],
            metadata=self._metadata,
            data_alignment=FILE_ALIGNMENT,
        )
        end = len(head) + sum(source.spec.nbytes for source in sources)
        file = _File(self._disk.create(self._folder / name, nbytes=end))
        self._open[file.descriptor] = file
        begin_of = {id(source): at for source, at in zip(ordered, begins, strict=True)}
        self._disk.write(file.descriptor, memoryview(head), at=0)
        for source in sources:
            found = [0] * -(-source.spec.nbytes // BLOCK_BYTES)
            sums[source.spec.key] = (name, found)
            for index in range(len(found)):
                if self._error is not None:
                    raise self._error
                self._submit(_Block(source, index, begin_of[id(source)], file, found), pool)
            if self._on_read is not None:
                self._on_read(source)
        self._finish_part(file)
        return FileEntry(name=name, nbytes=end, header_checksum=Checksum.CRC32C.of(head))

    def _submit(self, block: _Block, pool: ThreadPoolExecutor) -> None:
        copy = None
        if self._on_read is None:
            self._queued.acquire()
        else:
            copy = self._copy(block)
            if copy is None:
                return
        block.file.begin_part()
        pool.submit(self._work, block, copy)

    def _copy(self, block: _Block) -> memoryview | None:
        """A block's bytes in memory that was lent, as soon as there is some; None after a failure.

        The memory may be longer.
        """
        copy = self._staging.take(block.end - block.begin)
        if copy is not None:
            block.source.fill(block.begin, block.end, into=copy[: block.end - block.begin])
        return copy

    def _work(self, block: _Block, copy: memoryview | None) -> None:
        try:
            if self._error is not None:
                return
            if copy is not None:
                data: memoryview | None = copy[: block.end - block.begin]
            else:
                data = block.source.view(block.begin, block.end)
                data = data if data is not None and is_aligned(data) else None
            if data is None:
                self._by_pieces(block)
            else:
                block.sums[block.index] = Checksum.CRC32C.of(data)
                self._disk.write(block.file.descriptor, data, at=block.at + block.begin)
            self._finish_part(block.file)
        except BaseException as error:
            self._fail(error)
        finally:
            if copy is not None:
                self._staging.give(copy)
            if self._on_read is None:
                self._queued.release()

    def _by_pieces(self, block: _Block) -> None:
        """Copy and write so many bytes at a time that they are still in the cache when summed."""
        size = min(self._staging.block_bytes, block.end - block.begin)
        memory = self._staging.take(size)
        if memory is None:
            return
        try:
            found = 0
            for begin in range(block.begin, block.end, size):
                data = memory[: min(size, block.end - begin)]
                block.source.fill(begin, begin + len(data), into=data)
                found = Checksum.CRC32C.of(data, found)
                self._disk.write(block.file.descriptor, data, at=block.at + begin)
            block.sums[block.index] = found
        finally:
            self._staging.give(memory)

    def _finish_part(self, file: _File) -> None:
        if file.is_last():
            self._disk.sync(file.descriptor)
            del self._open[file.descriptor]
            self._disk.close(file.descriptor)

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self._staging.stop()


def _place(spec: TensorSpec) -> tuple[bool, int, int]:
    """Where a tensor comes in its file: whole pages first, since they can be written directly.

    Of the others wider elements come first, as the library does it, so that all lie aligned.
    """
    return bool(spec.nbytes % FILE_ALIGNMENT), -(spec.nbytes // max(spec.elements, 1)), -spec.nbytes
