"""Saves into one folder of checkpoints take turns, whatever process they are of.

Each save removes what earlier ones left half-written, and gives its own folder a name that others
may use too. The lock is the folder's own (`flock`): nothing is left when its holder is killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from typing import TYPE_CHECKING, Final

from forebay.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["folder_lock"]

_log = logging.getLogger("forebay")

_LOOK_SECONDS: Final = 0.05
_TELL_SECONDS: Final = 5.0
_LIMIT_SECONDS: Final = 600.0
# File systems without locks: there is no turn to take.
_NO_LOCKS: Final = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


@contextlib.contextmanager
def folder_lock(folder: Path, *, limit_seconds: float = _LIMIT_SECONDS) -> Iterator[None]:
    """Hold a folder's lock; waits for whoever holds it.

    Args:
        folder: Made if it is missing.
        limit_seconds: How long to wait.

    Raises:
        CheckpointError: Another save has held it for all of that time.
        OSError: The folder cannot be made or opened.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _acquire(descriptor, folder, limit_seconds=limit_seconds)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, folder: Path, *, limit_seconds: float) -> None:
    began, is_told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = time.monotonic() - began
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return
            raise
        else:
            return
        if waited > limit_seconds:
            raise CheckpointError(
                f"another save has been writing into {folder} for {waited:.0f} s",
                hint="give each run a folder of its own",
            )
        if waited > _TELL_SECONDS and not is_told:
            is_told = True
            _log.warning("waiting for another save that writes into %s", folder)
        time.sleep(_LOOK_SECONDS)
