"""NUMA: host memory spread evenly over the nodes whose cores work on it.

The update's chunks go to whichever worker is free, so no page has a home among the cores. What
matters is that every memory channel takes its part of the traffic. Left to first touch, masters lie
where the main thread ran at start-up and page-locked ranges where the locking thread did: one
socket's channels then carry them alone. So pages are interleaved where the process may use the
cores of several nodes. Where it is bound to one, first touch is local: nothing is asked.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from typing import TYPE_CHECKING, Any

from forebay.hardware.affinity import Topology

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["interleave", "nodes_at_work"]

# asm/unistd_64.h and asm-generic/unistd.h
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_INTERLEAVE = 3
_WORD_BITS = 64


@functools.cache
def nodes_at_work() -> tuple[int, ...]:
    """The nodes of the cores that this process may use, ascending; at least one."""
    return tuple(sorted({core.node for core in Topology.read().cores}))


def interleave(address: int, *, nbytes: int, nodes: Sequence[int], libc: Any | None = None) -> bool:
    """Spread the pages of an untouched range over nodes, as well as the system lets us.

    Containers often forbid it (a seccomp filter on `mbind`); pages then lie where they are first
    touched, which is slower on two sockets and right.

    Args:
        address: First byte, page-aligned.
        nbytes: Length.
        nodes: The nodes; fewer than two ask for nothing.
        libc: The C library; a parameter for tests.

    Returns:
        Whether the system took the wish.
    """
    number = _MBIND.get(platform.machine())
    if len(nodes) < 2 or not nbytes or number is None:
        return False
    words = max(nodes) // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << (node % _WORD_BITS)
    library = libc or ctypes.CDLL(None, use_errno=True)
    # The kernel takes one bit less than it is told.
    failed = library.syscall(
        ctypes.c_long(number),
        ctypes.c_ulong(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_ulong(_MPOL_INTERLEAVE),
        mask,
        ctypes.c_ulong(words * _WORD_BITS + 1),
        ctypes.c_ulong(0),
    )
    return bool(failed == 0)
