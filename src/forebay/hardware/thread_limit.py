"""What is said where the system starts no more threads."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from forebay.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["starting"]

# The native core's words and those of Python.
_WORDS = (os.strerror(errno.EAGAIN), "can't start new thread")


@contextlib.contextmanager
def starting(what: str) -> Iterator[None]:
    """Make workers inside; `what` they are for is named where they cannot start.

    Raises:
        TransferError: The system refuses a thread, with errno EAGAIN. Its own words, "Resource
            temporarily unavailable", name neither.
    """
    try:
        yield
    except RuntimeError as error:
        if str(error) not in _WORDS:
            raise
        failure = TransferError(
            f"the system starts no more threads, and {what} needs some: {error} (errno "
            f"{errno.EAGAIN})",
            hint="raise the limit on processes or on address space (ulimit -u, ulimit -v; of a "
            "container pids.max), or end other programs",
        )
        failure.errno = errno.EAGAIN
        raise failure from error
