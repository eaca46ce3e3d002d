"""Files that belong to a model beside its tensors: its tokenizer, copied into what is exported.

They may be a stranger's: only regular files of a tokenizer's names are read, and nothing that an
export writes itself is replaced.
"""

from __future__ import annotations

import os
import re
import stat
from enum import Enum
from typing import TYPE_CHECKING, Final

from forebay.checkpoint.locate import CHECKPOINTS, TOKENIZER
from forebay.errors import CheckpointError, ConfigError
from forebay.units_of_measure import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from forebay.checkpoint.disk import Disk

__all__ = ["Links", "copy_tokenizer", "find_tokenizer"]

# What tokenizers of transformers save: tokenizer.json, vocab.txt, merges.txt, spiece.model, ...
_FILES: Final = re.compile(
    r"(tokenizer|special_tokens|added_tokens|vocab|merges|spiece|sentencepiece|chat_template)"
    r"[A-Za-z0-9_.-]{0,60}\.(json|txt|model|jinja|bpe|tiktoken)"
)
_FOLDERS: Final = ("additional_chat_templates",)
# The largest are some 35 MB.
_MAX_BYTES: Final = 256 << 20


class Links(Enum):
    """What a link among the files means."""

    FOLLOW = "follow"
    """The user named the folder; model hubs keep files as links."""
    REFUSE = "refuse"
    """The folder came with a run: a link in it could name anything of the user's."""


def find_tokenizer(checkpoint: Path) -> Path | None:
    """The tokenizer that `forebay train` kept in the run of a checkpoint, or None."""
    run = checkpoint.resolve().parent.parent
    folder = run / TOKENIZER
    is_of_run = checkpoint.resolve().parent.name == CHECKPOINTS
    return folder if is_of_run and folder.is_dir() and not folder.is_symlink() else None


def copy_tokenizer(source: Path, target: Path, *, disk: Disk, links: Links) -> int:
    """Copy a tokenizer's files, durable; returns how many.

    Args:
        source: A folder that `tokenizer.save_pretrained` wrote, or a model's.
        target: The folder that is written.
        disk: Where it is.
        links: What a link means.

    Raises:
        ConfigError: There is none.
        CheckpointError: A file is no regular one, or too large.
        OSError: It cannot be read or written.
    """
    if not source.is_dir():
        raise ConfigError(f"{source} is no folder", hint="name a tokenizer's folder")
    count = 0
    for item in sorted(source.iterdir()):
        if _FILES.fullmatch(item.name):
            _copy(item, target / item.name, disk=disk, links=links)
            count += 1
        elif item.name in _FOLDERS and item.is_dir() and not item.is_symlink():
            disk.make_folder(target / item.name)
            for template in sorted(item.iterdir()):
                if template.suffix == ".jinja":
                    _copy(template, target / item.name / template.name, disk=disk, links=links)
            disk.sync_folder(target / item.name)
    if not count:
        raise ConfigError(
            f"there is no tokenizer in {source}",
            hint="name a folder that tokenizer.save_pretrained wrote",
        )
    return count


def _copy(source: Path, target: Path, *, disk: Disk, links: Links) -> None:
    if links is Links.REFUSE and source.is_symlink():
        raise CheckpointError(f"{source} is a link", hint="--tokenizer names another folder")
    file = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(file, "rb") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{source} is no regular file")
        if status.st_size > _MAX_BYTES:
            raise CheckpointError(
                f"{source} has {format_bytes(status.st_size)}, and a tokenizer's file at most "
                f"{format_bytes(_MAX_BYTES)}"
            )
        data = opened.read(_MAX_BYTES + 1)
    written = disk.create(target)
    try:
        disk.write(written, memoryview(data), at=0)
        disk.sync(written)
    finally:
        disk.close(written)
