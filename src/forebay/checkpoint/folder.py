"""The folder of a run's checkpoints: names, the newest, and the one moment when a new one is there.

[Note: order] A checkpoint is written into a hidden folder: tensors, then the manifest, each made
durable; then the folder's names; then the folder gets its name, and the parent's names are made
durable; then `latest` is replaced the same way. A crash at any point leaves the old checkpoint or
the new one, whole. Where the tag is there already, the old one steps aside under a hidden name
first; if the crash comes just then, readers find it there.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from forebay.checkpoint.manifest import MANIFEST
from forebay.checkpoint.values import is_unicode
from forebay.errors import CheckpointError
from forebay.hardware.reason import NO_FILES_LEFT, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from forebay.checkpoint.disk import Disk

__all__ = ["LATEST", "CheckpointFolder", "check_tag"]

LATEST: Final = "latest"
_PARTIAL: Final = ".forebay-partial"
_REPLACED: Final = ".forebay-replaced"
_START: Final = b'{"format":"forebay-checkpoint"'
# ext4 and most others allow 255 bytes; ours add at most 18.
_MAX_TAG_BYTES: Final = 200


def check_tag(tag: object) -> str:
    """A tag as text.

    Raises:
        CheckpointError: It is no plain folder name.
    """
    text = str(tag)
    if (
        not text
        or text != text.strip()
        or text.startswith(".")
        or any(char in "/\\\0\n" for char in text)
        or text == LATEST
        or text.endswith((_PARTIAL, _REPLACED))
        or not is_unicode(text)
        or len(text.encode()) > _MAX_TAG_BYTES
    ):
        raise CheckpointError(
            f"{text[:80]!r} cannot be a checkpoint's tag",
            hint="a plain folder name that neither starts with a dot nor ends as ours do, for "
            "example global_step100",
        )
    return text


class CheckpointFolder:
    """Where the checkpoints of one run are, a folder each.

    One save writes into it at a time: callers hold `folder_lock`.

    Args:
        path: The folder.
        disk: Where it is.
    """

    def __init__(self, path: Path, *, disk: Disk) -> None:
        self.path = path
        self._disk = disk

    def complete(self) -> list[Path]:
        """Complete checkpoints, the newest first (by when their manifest was written)."""
        try:
            folders = [item for item in self.path.iterdir() if _is_complete(item)]
        except OSError:
            return []
        tags = {item.name for item in folders}
        dated = [
            (written, item.name, item)
            for item in folders
            if not _stands_for(item, tags) and (written := _written_at(item)) is not None
        ]
        return [item for *_, item in sorted(dated, reverse=True)]

    def find(self, tag: object | None) -> Path | None:
        """The checkpoint with a tag, or the one that `latest` names; None without `latest`.

        Raises:
            CheckpointError: There is no complete one; says what is there instead.
        """
        if tag is None:
            file = self.path / LATEST
            if not file.is_file():
                return None
            with _readable(file), file.open("rb") as opened:
                tag = opened.read(4096).decode("utf-8", errors="replace").strip()
        name = check_tag(tag)
        for item in (self.path / name, self.path / f".{name}{_REPLACED}"):
            with _readable(item):
                if _is_complete(item):
                    return item
        raise CheckpointError(self._missing(name), hint=self._others())

    def _missing(self, name: str) -> str:
        folder = self.path / name
        if folder.is_symlink():
            return f"{folder} is a link, not a folder"
        if folder.is_dir():
            return f"{folder} has no {MANIFEST}, so it is no complete checkpoint"
        if (self.path / f".{name}{_PARTIAL}").is_dir():
            return f"checkpoint {name} in {self.path} was not written to its end"
        return f"no checkpoint {name} in {self.path}"

    def _others(self) -> str:
        names = [item.name for item in self.complete()]
        return f"complete ones: {', '.join(names[:5])}" if names else "there is no complete one"

    def begin(self, tag: str) -> Path:
        """Make the hidden folder that a new checkpoint is written into.

        What earlier saves left behind when they were killed is removed.
        """
        for item in list(self.path.iterdir()):
            if item.name.startswith(".") and item.name.endswith(_REPLACED):
                home = self.path / item.name[1 : -len(_REPLACED)]
                if not home.exists() and _is_complete(item):
                    self._disk.rename(item, home)
                else:
                    self._disk.remove_tree(item)
            elif item.name.startswith(".") and item.name.endswith(_PARTIAL):
                self._disk.remove_tree(item)
        partial = self.hidden(tag)
        self._disk.make_folder(partial)
        return partial

    def hidden(self, tag: str) -> Path:
        """The folder that `begin` makes."""
        return self.path / f".{tag}{_PARTIAL}"

    def abandon(self, partial: Path) -> None:
        """Remove what was written of a checkpoint that failed."""
        self._disk.remove_tree(partial)

    def commit(self, partial: Path, *, tag: str) -> Path:
        """Give a folder whose files are all durable its name; see [Note: order]."""
        self._disk.sync_folder(partial)
        final, aside = self.path / tag, self.path / f".{tag}{_REPLACED}"
        replaces = final.exists() or final.is_symlink()
        if replaces:
            self._disk.rename(final, aside)
        self._disk.rename(partial, final)
        self._disk.sync_folder(self.path)
        if replaces:
            self._disk.remove_tree(aside)
        return final

    def point_latest(self, tag: str) -> None:
        """Make `latest` name a checkpoint, all at once."""
        partial = self.path / f".{LATEST}{_PARTIAL}"
        self._disk.remove_tree(partial)
        file = self._disk.create(partial)
        try:
            self._disk.write(file, memoryview(f"{tag}\n".encode()), at=0)
            self._disk.sync(file)
        finally:
            self._disk.close(file)
        self._disk.rename(partial, self.path / LATEST)
        self._disk.sync_folder(self.path)

    def keep_newest(self, count: int, *, tag: str) -> None:
        """Remove all but the newest complete checkpoints; never `tag`, nor what `latest` names."""
        named = {tag}
        file = self.path / LATEST
        if file.is_file():
            named.add(file.read_text(encoding="utf-8", errors="replace").strip())
        for item in self.complete()[count:]:
            if item.name not in named and not item.is_symlink():
                self._disk.remove_tree(item)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason, hint = reason_of(error)
        raise CheckpointError(f"cannot read {path}: {reason}", hint=hint) from error


def _is_complete(item: Path) -> bool:
    """Whether a folder has a manifest of ours; that comes last, so all else is there.

    Raises:
        OSError: No file can be opened any more, so that nothing is known: a caller would remove
            what it takes for incomplete.
    """
    if item.is_symlink() or item.name.endswith(_PARTIAL):
        return False
    manifest = item / MANIFEST
    try:
        if not manifest.is_file():  # opening a pipe would wait for who writes to it
            return False
        with manifest.open("rb") as opened:
            return opened.read(len(_START)) == _START
    except OSError as error:
        if error.errno in NO_FILES_LEFT:
            raise
        return False


def _written_at(item: Path) -> int | None:
    """When a checkpoint's manifest was written; None where another process has removed it."""
    try:
        return (item / MANIFEST).stat().st_mtime_ns
    except OSError:
        return None


def _stands_for(item: Path, tags: set[str]) -> bool:
    """Whether a folder that stepped aside has its successor beside it."""
    return item.name.endswith(_REPLACED) and item.name[1 : -len(_REPLACED)] in tags
