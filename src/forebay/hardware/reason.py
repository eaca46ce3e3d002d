"""Why the system refused, with the numbers that its own words leave out.

"Too many open files" names no limit, and "Cannot allocate memory" is also what a process hears that
has enough memory and too many mappings.
"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NO_FILES_LEFT", "reason_of"]

NO_FILES_LEFT = frozenset({errno.EMFILE, errno.ENFILE})
# What `ulimit -n` is worth raising to: the usual hard limit of a session.
_PLENTY_OF_FILES = 4096
# An allocation makes a few mappings at once (its guard pages are mappings of their own).
_MAPPINGS_AT_ONCE = 8


def reason_of(
    error: OSError, *, hint: str | None = None, proc: Path = Path("/proc")
) -> tuple[str, str | None]:
    """What the system said, and what can be done about it.

    Args:
        error: What it raised.
        hint: What is worth saying where the error is none of those that are known here, and has
            no hint of its own.
        proc: Where the system tells of this process and of its limits.

    Example:
        >>> reason_of(OSError(errno.EACCES, "Permission denied"), hint="name another folder")
        ('Permission denied', 'name another folder')
    """
    plain = error.strerror or str(error)
    known: dict[int | None, Callable[[Path], tuple[str, str] | None]] = {
        errno.EMFILE: _no_descriptor,
        errno.ENFILE: _no_system_file,
        errno.ENOMEM: _no_mapping,
    }
    explain = known.get(error.errno)
    found = None if explain is None else explain(proc)
    if found is None:
        return plain, getattr(error, "hint", None) or hint
    return f"{os.strerror(error.errno or 0)}: {found[0]}", found[1]


def _no_descriptor(proc: Path) -> tuple[str, str]:
    """Nothing is read: that would take a descriptor, of which there is none."""
    del proc
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(2 * soft, _PLENTY_OF_FILES)
    top = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    advice = f"raise the limit in the shell that starts the process (ulimit -n {top})"
    if top <= soft:
        advice = f"the hard limit is {hard} too: close files, or let an administrator raise it"
    return (
        f"one more is needed, and all {soft} that the limit on open files lets this process have "
        "are in use",
        advice,
    )


def _no_system_file(proc: Path) -> tuple[str, str]:
    del proc
    return (
        "the whole machine has no more, whatever this process may have",
        "end other programs, or raise fs.file-max (sysctl)",
    )


def _no_mapping(proc: Path) -> tuple[str, str] | None:
    try:
        limit = int((proc / "sys/vm/max_map_count").read_text(encoding="ascii"))
        with (proc / "self/maps").open("rb") as lines:
            count = sum(1 for _ in lines)
    except (OSError, ValueError):
        return None
    if count + _MAPPINGS_AT_ONCE < limit:
        return None
    return (
        f"this process has {count} mappings of memory, and vm.max_map_count is {limit}",
        f"raise it (sysctl -w vm.max_map_count={4 * limit})",
    )
