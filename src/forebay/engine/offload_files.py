"""Files for state, as `forebay.offload` is asked for them in plain values."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from forebay.engine.file_space import NvmeOptions
from forebay.errors import ConfigError
from forebay.links.host_nvme import FileAccess
from forebay.tiers.nvme import ALIGNMENT_BYTES

__all__ = ["Folders", "nvme_options", "refuse_a_folder_twice"]

Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

# Names in DeepSpeed's section `aio`: what each is here, its least value and its largest.
_NUMBERS: Final = {
    "block_size": ("block_bytes", ALIGNMENT_BYTES, 1 << 30),
    "queue_depth": ("queue_depth", 1, 128),
    "intra_op_parallelism": ("parallelism", 1, 128),
    "thread_count": ("parallelism", 1, 128),
}
_FLAGS: Final = ("single_submit", "overlap_events")


def nvme_options(paths: Folders | None, *, aio: Mapping[str, Any] | None) -> NvmeOptions | None:
    """The engine's options; None without a folder.

    Raises:
        ConfigError: A folder is named twice, or a value of `aio` cannot be honoured.

    Example:
        >>> nvme_options("/tmp", aio={"queue_depth": 32}).access.depth
        32
    """
    if aio is not None and not isinstance(aio, Mapping):
        raise ConfigError(f"aio is {aio!r}; it must be a dict", hint='aio={"queue_depth": 32}')
    if paths is None:
        if aio:
            raise ConfigError(
                "aio says how files are read, and no folder is given for any",
                hint='nvme_path="/folder/on/a/local/drive"',
            )
        return None
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(given, Sequence) or not all(isinstance(p, str | os.PathLike) for p in given):
        raise ConfigError(
            f"nvme_path is {paths!r}; it must be a folder, or a list of folders",
            hint='nvme_path="/folder/on/a/local/drive"',
        )
    if any(not os.fspath(one) for one in given):
        raise ConfigError(
            "nvme_path names a folder with an empty name",
            hint='nvme_path="." is the current folder, nvme_path=None keeps state in memory',
        )
    found = [Path(one) for one in given]
    refuse_a_folder_twice(found, key="nvme_path")
    if not found:
        raise ConfigError("nvme_path is an empty list", hint="nvme_path=None keeps state in memory")
    return NvmeOptions(paths=tuple(found), access=_access(aio or {}))


def refuse_a_folder_twice(paths: Sequence[Path], *, key: str) -> None:
    """Refuse a striped set whose folders are not different ones, however they are written.

    Raises:
        ConfigError: With both ways to write it; also of a path that no file system can have.
    """
    known: dict[object, Path] = {}
    for path in paths:
        if "\0" in str(path):
            raise ConfigError(
                f"{key} names {str(path)!r}: no path has a zero byte",
                hint="name a folder on a local drive",
            )
        here: object = path
        with contextlib.suppress(OSError):
            found = path.stat()
            here = (found.st_dev, found.st_ino)
        other = known.get(here)
        if other is not None:
            what = f"{path} {paths.count(path)} times"
            if other != path:
                what = f"{other} and {path}, which are one folder"
            raise ConfigError(
                f"{key} names {what}: a striped set has each folder once",
                hint="several drives make it faster, one drive twice does not",
            )
        known[here] = path


def _access(aio: Mapping[str, Any]) -> FileAccess:
    chosen: dict[str, Any] = {}
    for name, value in aio.items():
        if name in _FLAGS:
            if not isinstance(value, bool):
                raise ConfigError(f"aio.{name} is {value!r}; it must be true or false")
            chosen[name] = value
        elif name in _NUMBERS:
            meaning, least, most = _NUMBERS[name]
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or not least <= value <= most or value % least:
                text = f"an integer from {least} to {most}"
                if least > 1:
                    text += f", a multiple of {least}"
                raise ConfigError(f"aio.{name} is {value!r}; it must be {text}")
            if meaning in chosen:
                raise ConfigError(
                    "aio.thread_count and aio.intra_op_parallelism mean the same",
                    hint="give one of the two",
                )
            chosen[meaning] = value
        else:
            raise ConfigError(
                f"aio has no {name}",
                hint=f"one of {', '.join((*_NUMBERS, *_FLAGS))}",
            )
    return FileAccess(**chosen)
