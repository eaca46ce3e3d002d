"""Where commands write: tried before anything is measured, and one line where it fails later."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from forebay.errors import StorageError, TransferError
from forebay.hardware.reason import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["below", "file_to_write", "folder_to_write", "saying", "write_text"]


def file_to_write(path: Path | None) -> Path | None:
    """An option's callback: refuse a file that could not be written.

    Raises:
        typer.BadParameter: Its folder is not there, or the user may not write it.
    """
    if path is not None:
        folder = Path.absolute(path).parent
        # `access` answers where `stat` raises: in a folder that may not be entered.
        if not os.access(folder, os.F_OK):
            raise typer.BadParameter(f"{path} lies in a folder that is not there")
        if not folder.is_dir():
            raise typer.BadParameter(f"{path} lies in {folder}, which is a file")
        if not os.access(path if os.access(path, os.F_OK) else folder, os.W_OK):
            raise typer.BadParameter(f"{path} cannot be written")
    return path


def folder_to_write(path: Path | None) -> Path | None:
    """An option's callback: refuse a folder that could not be made or written.

    Raises:
        typer.BadParameter: It is a file or lies in one, or the user may not write it.
    """
    if path is not None:
        there = Path.absolute(path)
        while not os.access(there, os.F_OK):
            there = there.parent
        if not there.is_dir():
            raise typer.BadParameter(f"{there} is a file")
        if not os.access(there, os.W_OK | os.X_OK):
            raise typer.BadParameter(f"{path} cannot be written")
    return path


def write_text(path: Path, text: str) -> None:
    """Write a file, and say so on stderr.

    Raises:
        TransferError: It could not be written.
    """
    with saying(path):
        path.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {path}", err=True)


@contextlib.contextmanager
def saying(path: Path) -> Iterator[None]:
    """Inside it, a failed write is one line.

    Raises:
        TransferError: It could not be written.
    """
    try:
        yield
    except OSError as error:
        reason, hint = reason_of(error, hint="name a place that you may write to")
        raise TransferError(f"cannot write {path}: {reason}", hint=hint) from error


@contextlib.contextmanager
def below(folder: Path) -> Iterator[Path]:
    """A folder in a folder, for as long as something is measured there.

    Raises:
        StorageError: None can be made.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=folder)
    except OSError as error:
        reason, hint = reason_of(
            error, hint="name a folder on the drive to measure that this user may write"
        )
        raise StorageError(
            f"cannot make a folder in {folder}: {reason} (errno {error.errno})", hint=hint
        ) from error
    with made as inside:
        yield Path(inside)
