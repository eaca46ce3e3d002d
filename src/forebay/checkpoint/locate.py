"""From what people type to a checkpoint: its own folder, a folder of several, or a run's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.folder import CheckpointFolder
from forebay.checkpoint.manifest import MANIFEST
from forebay.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CHECKPOINTS", "TOKENIZER", "locate"]

# Where `forebay train` keeps them, in the run's folder, and the tokenizer that belongs to them.
CHECKPOINTS: Final = "checkpoints"
TOKENIZER: Final = "tokenizer"
_HINT: Final = "name a checkpoint, a folder of checkpoints, or a run's folder"


def locate(path: Path) -> Path:
    """The checkpoint that a path means: itself, what `latest` names in it, or the newest there.

    Raises:
        ConfigError: The path is no folder.
        CheckpointError: There is none in it.
    """
    if (path / MANIFEST).is_file():
        return path
    for folder in (path, path / CHECKPOINTS):
        if folder.is_dir():
            found = CheckpointFolder(folder, disk=RealDisk())
            named = found.find(None)
            if named is not None:
                return named
            complete = found.complete()
            if complete:
                return complete[0]
    if not path.is_dir():
        raise ConfigError(f"{path} is no folder", hint=_HINT)
    raise CheckpointError(f"{path} has no complete checkpoint", hint=_HINT)
