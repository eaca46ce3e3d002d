"""The native core's interface in torch operations: the same names, the same bits, no threads.

Every call does its work before it returns, so a ticket has always ended. It is slow: updates run
operation by operation and nothing overlaps. Signatures follow `_core.pyi`, not the house rules.
"""

from __future__ import annotations

from forebay._fallback.checksum import crc32c
from forebay._fallback.engines import CopyEngine, CudaEngine, MemcpyEngine, ScriptedEngine
from forebay._fallback.files import (
    FileBackend,
    FileQueue,
    FileSet,
    ScriptedBackend,
    ThreadBackend,
    UringBackend,
)
from forebay._fallback.links import CopyPlan, Link, StagingRing
from forebay._fallback.memory import convert, join, split
from forebay._fallback.pool import Hyper, PartState, Pool
from forebay._fallback.sums import SUM_ELEMENTS
from forebay._fallback.tickets import Ticket

__all__ = [
    "SUM_ELEMENTS",
    "CopyEngine",
    "CopyPlan",
    "CudaEngine",
    "FileBackend",
    "FileQueue",
    "FileSet",
    "Hyper",
    "Link",
    "MemcpyEngine",
    "PartState",
    "Pool",
    "ScriptedBackend",
    "ScriptedEngine",
    "StagingRing",
    "ThreadBackend",
    "Ticket",
    "UringBackend",
    "convert",
    "crc32c",
    "join",
    "kernel_level",
    "split",
]


def kernel_level() -> str:
    """The fallback has one level."""
    return "fallback"
