"""Opens a checkpoint that nobody vouches for, verifies it, and reads parts of it.

Nothing outside its folder is opened: names are plain, links are refused. Memory is bounded by a
few blocks, whatever the files say of their sizes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from forebay.checkpoint.header import DTYPES, MAX_HEADER_BYTES, TensorSpec, parse_header
from forebay.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    OWN_DTYPE,
    Role,
)
from forebay.checkpoint.manifest_json import MAX_MANIFEST_BYTES, parse_manifest
from forebay.errors import CheckpointError
from forebay.hardware.reason import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path
    from types import TracebackType

    from forebay.checkpoint.manifest import FileEntry, ParameterEntry, Slice

    # (tensor or None for a generator's, first element, one past the last) -> whether it is read
    Picks = Callable[[ParameterEntry | None, int, int], bool]

__all__ = ["Checkpoint", "stored_dtype"]

_THREADS: Final = 4
# What one thread holds while it verifies.
_PART_BYTES: Final = 1 << 20


class _File(NamedTuple):
    descriptor: int
    data_at: int
    tensors: dict[str, tuple[TensorSpec, int, int]]


class Checkpoint:
    """An open checkpoint: its manifest, and the bytes behind it.

    Opening checks names, sizes and headers; `verify` checks every byte.

    Args:
        folder: The checkpoint's own folder.

    Attributes:
        folder: The same.
        manifest: What it holds.

    Raises:
        CheckpointError: Something is missing or not what the manifest says; names the file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, _File] = {}
        self._stack = contextlib.ExitStack()
        try:
            self._folder = self._open_folder(folder)
            self.manifest = parse_manifest(self._read_manifest(), what=str(folder / MANIFEST))
            for entry in self.manifest.files:
                self._files[entry.name] = self._open_file(entry)
            self._check_tensors()
        except BaseException:
            self.close()
            raise

    def _open_folder(self, folder: Path) -> int:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            raise _cannot(f"open the checkpoint {folder}", error) from error
        self._stack.callback(os.close, descriptor)
        return descriptor

    def _open(self, name: str) -> tuple[int, int]:
        """Descriptor and size of a regular file of the folder."""
        path = self.folder / name
        try:
            descriptor = os.open(
                name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._folder
            )
        except OSError as error:
            raise _cannot(f"open {path}", error) from error
        self._stack.callback(os.close, descriptor)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is no regular file")
        return descriptor, status.st_size

    def _read_manifest(self) -> bytearray:
        descriptor, size = self._open(MANIFEST)
        if size > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"{self.folder / MANIFEST} has {size} bytes, and a manifest at most "
                f"{MAX_MANIFEST_BYTES}"
            )
        return self._pread(descriptor, size, at=0, name=MANIFEST)

    def _open_file(self, entry: FileEntry) -> _File:
        path = self.folder / entry.name
        descriptor, size = self._open(entry.name)
        if size != entry.nbytes:
            raise CheckpointError(f"{path} has {size} bytes; the manifest says {entry.nbytes}")
        length = int.from_bytes(self._pread(descriptor, 8, at=0, name=entry.name), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{path} says that its header has {length} bytes of its {size}")
        text = self._pread(descriptor, length, at=8, name=entry.name)
        checksum = self.manifest.checksum
        found = checksum.of(text, checksum.of(length.to_bytes(8, "little")))
        if found != entry.header_checksum:
            raise CheckpointError(f"{path} is damaged: the checksum of its header does not match")
        tensors = parse_header(text, data_bytes=size - 8 - length, what=str(path))
        return _File(descriptor, 8 + length, tensors)

    def _check_tensors(self) -> None:
        """Every slice is a tensor of the file that it names, and there are no others."""
        expected: dict[str, set[str]] = {name: set() for name in self._files}
        for _, spec, piece in self._everything():
            found = self._files[piece.file].tensors.get(spec.key)
            if found is None or found[0] != spec or spec.key in expected[piece.file]:
                raise CheckpointError(
                    f"{self.folder / piece.file} does not hold {spec.key[:80]!r} as the manifest "
                    "describes it"
                )
            expected[piece.file].add(spec.key)
        for name, keys in expected.items():
            extra = self._files[name].tensors.keys() - keys
            if extra:
                raise CheckpointError(
                    f"{self.folder / name} holds {min(extra)[:80]!r}, which the manifest does not "
                    "name"
                )

    def _everything(
        self, roles: Collection[Role] = tuple(Role)
    ) -> Iterator[tuple[ParameterEntry | None, TensorSpec, Slice]]:
        for entry in self.manifest.parameters:
            for role, pieces in entry.slices.items():
                if role in roles:
                    yield from ((entry, entry.spec(role, piece), piece) for piece in pieces)
        if Role.RANDOM in roles:
            for spec, piece in self.manifest.random_tensors.values():
                yield None, spec, piece

    def nbytes(self, roles: Collection[Role] = tuple(Role)) -> int:
        """Bytes of tensors, all of them or of some roles."""
        return sum(spec.nbytes for _, spec, _ in self._everything(roles))

    def verify(self, roles: Collection[Role] = tuple(Role), *, picks: Picks | None = None) -> None:
        """Read bytes and compare their checksums.

        Args:
            roles: Of which roles.
            picks: Says of a block of a named tensor whether it is read; None reads all.

        Raises:
            CheckpointError: A file is damaged; names it and the tensor.
        """
        checksum = self.manifest.checksum
        buffers = threading.local()

        def prepare() -> None:
            buffers.part = memoryview(bytearray(_PART_BYTES))

        def check(item: tuple[TensorSpec, Slice, int]) -> None:
            spec, piece, index = item
            begin = index * BLOCK_BYTES
            nbytes = min(BLOCK_BYTES, spec.nbytes - begin)
            file = self._files[piece.file]
            at = file.data_at + file.tensors[spec.key][1] + begin
            found = 0
            for part in range(at, at + nbytes, _PART_BYTES):
                data = buffers.part[: min(_PART_BYTES, at + nbytes - part)]
                self._read_into(data, file.descriptor, at=part, name=piece.file)
                found = checksum.of(data, found)
            if found != piece.checksums[index]:
                raise CheckpointError(
                    f"{self.folder / piece.file} is damaged: the checksum of "
                    f"{spec.key[:80]!r} does not match",
                    hint="load another checkpoint; nothing was changed",
                )

        blocks = (
            (spec, piece, index)
            for entry, spec, piece in self._everything(roles)
            for index in range(len(piece.checksums))
            if picks is None or picks(entry, *_elements(spec, piece, index))
        )
        with ThreadPoolExecutor(_THREADS, "forebay-verify", initializer=prepare) as pool:
            # a batch at a time, so that the first damage is found before all is read
            while batch := [item for _, item in zip(range(4 * _THREADS), blocks, strict=False)]:
                list(pool.map(check, batch))

    def read(self, entry: ParameterEntry, role: Role, start: int, end: int) -> torch.Tensor:
        """Elements `[start, end)` of a role, flat, in memory of its own.

        Raises:
            CheckpointError: A file cannot be read any more.
        """
        into = torch.empty(end - start, dtype=stored_dtype(entry, role))
        self.read_into(into, entry, role, start)
        return into

    def read_into(self, into: torch.Tensor, entry: ParameterEntry, role: Role, start: int) -> None:
        """Read the elements of a role from `start` on into a flat tensor of the dtype they have.

        Raises:
            CheckpointError: A file cannot be read any more.
        """
        dtype, end = into.dtype, start + into.numel()
        for piece in entry.slices[role]:
            first, last = max(start, piece.start), min(end, piece.end)
            if first < last:
                file = self._files[piece.file]
                begin = file.tensors[entry.spec(role, piece).key][1]
                at = file.data_at + begin + (first - piece.start) * dtype.itemsize
                target = into[first - start : last - start].view(torch.uint8).numpy()
                self._read_into(target.data, file.descriptor, at=at, name=piece.file)

    def random_tensor(self, name: str) -> torch.Tensor:
        """A random generator's state."""
        spec, piece = self.manifest.random_tensors[name]
        file = self._files[piece.file]
        at = file.data_at + file.tensors[spec.key][1]
        data = self._pread(file.descriptor, spec.nbytes, at=at, name=piece.file)
        return torch.frombuffer(data, dtype=DTYPES[spec.dtype]).reshape(spec.shape)

    def _pread(self, descriptor: int, nbytes: int, *, at: int, name: str) -> bytearray:
        data = bytearray(nbytes)
        self._read_into(memoryview(data), descriptor, at=at, name=name)
        return data

    def _read_into(self, left: memoryview, descriptor: int, *, at: int, name: str) -> None:
        try:
            while left:
                count = os.preadv(descriptor, [left], at)
                if not count:
                    raise CheckpointError(f"{self.folder / name} ends before byte {at + len(left)}")
                left, at = left[count:], at + count
        except OSError as error:
            raise _cannot(f"read {self.folder / name}", error) from error

    def close(self) -> None:
        """Close its files. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _elements(spec: TensorSpec, piece: Slice, index: int) -> tuple[int, int]:
    """The elements of a named tensor that are in a block of one of its slices."""
    per_block = BLOCK_BYTES // DTYPES[spec.dtype].itemsize
    first = piece.start + index * per_block
    return first, min(first + per_block, piece.end)


def stored_dtype(entry: ParameterEntry, role: Role) -> torch.dtype:
    """What the elements of a role are in their files."""
    return DTYPES[entry.dtype if role in OWN_DTYPE else "F32"]


def _cannot(what: str, error: OSError) -> CheckpointError:
    reason, hint = reason_of(error)
    if error.errno in {errno.ELOOP, errno.EMLINK}:
        reason = "it is a link"
    return CheckpointError(f"cannot {what}: {reason}", hint=hint)
