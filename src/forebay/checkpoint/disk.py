"""The seam to the file system: the few operations that a checkpoint is made of.

Tests put a recorder or a failing disk in its place; nothing else in this package writes files.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Disk", "RealDisk"]


class Disk(Protocol):
    """What saving asks of a file system.

    Call order for a file: `create`, any number of `write`s from any thread, `sync`, `close`.
    For a folder: `make_folder`, its files, `sync_folder`, `rename`, `sync_folder` of its parent.
    Every method raises OSError.
    """

    def make_folder(self, path: Path) -> None:
        """Make a folder that is not there yet."""

    def create(self, path: Path) -> int:
        """Make a new file and return its descriptor."""
        ...

    def write(self, file: int, data: memoryview, *, at: int) -> None:
        """Write all of `data` at a position."""

    def sync(self, file: int) -> None:
        """Make a file's bytes durable."""

    def close(self, file: int) -> None:
        """Close a descriptor."""

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name at once, over a file that has it."""

    def remove_tree(self, path: Path) -> None:
        """Remove a folder (never through a link) or a file, if it is there."""


class RealDisk:
    """The operating system's."""

    def make_folder(self, path: Path) -> None:
        """Make a folder that is not there yet."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """Make a new file and return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)

    def write(self, file: int, data: memoryview, *, at: int) -> None:
        """Write all of `data` at a position, and let it go to the disk at once."""
        begin, left = at, data
        while left:
            written = os.pwrite(file, left, at)
            left, at = left[written:], at + written
        # Starts the write-back and drops clean pages, so that no gigabytes of dirty pages wait
        # for the sync, or push other memory out.
        os.posix_fadvise(file, begin, len(data), os.POSIX_FADV_DONTNEED)

    def sync(self, file: int) -> None:
        """Make a file's bytes durable."""
        os.fsync(file)

    def close(self, file: int) -> None:
        """Close a descriptor."""
        os.close(file)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name at once, over a file that has it."""
        source.replace(target)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder (never through a link) or a file, if it is there."""
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)
        elif path.exists():
            shutil.rmtree(path)
