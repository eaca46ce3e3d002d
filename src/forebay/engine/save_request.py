"""Where and how a checkpoint is saved, and what saving it took."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from forebay.checkpoint.manifest import BLOCK_BYTES
from forebay.errors import CheckpointError
from forebay.hardware.reason import reason_of
from forebay.hardware.thread_limit import starting

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "LEAST_SAVE_BYTES",
    "Latest",
    "SaveReport",
    "SaveRequest",
    "SaveTiming",
    "as_checkpoint_error",
    "least_save_bytes",
]

# For each of four threads one checksum's block of fp32 state in files.
LEAST_SAVE_BYTES: Final = 4 * (256 << 10)


class SaveTiming(Enum):
    """Whether saving ends before it returns."""

    AT_ONCE = "at once"
    BESIDE_TRAINING = "beside training"
    """See `engine.saving`, [Note: asynchronous saving]."""


class Latest(Enum):
    """Whether `latest` names the new checkpoint."""

    POINT = "point"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Where and how to save.

    Attributes:
        folder: The folder of checkpoints.
        tag: The new one's name.
        latest: Whether `latest` names it.
        keep: Complete checkpoints that stay; None keeps all.
        timing: At once or beside training.
        staging_bytes: Host memory for copies beside training; None for as much as there is room
            for, at most the state's size.
    """

    folder: Path
    tag: str
    latest: Latest = Latest.POINT
    keep: int | None = None
    timing: SaveTiming = SaveTiming.AT_ONCE
    staging_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save took.

    Attributes:
        nbytes: Bytes of tensors, those of all ranks.
        seconds: From the call to the last rename.
        stall_seconds: How long training stood still for it on this rank.
        path: The checkpoint.
    """

    nbytes: int
    seconds: float
    stall_seconds: float
    path: Path


@contextlib.contextmanager
def as_checkpoint_error(request: SaveRequest) -> Iterator[None]:
    """Let the file system's errors say which save failed."""
    try:
        with starting("the writer of a checkpoint"):
            yield
    except OSError as error:
        reason, hint = reason_of(error)
        raise CheckpointError(
            f"cannot save checkpoint {request.tag} in {request.folder}: {reason}; earlier ones are "
            "as they were",
            hint=hint,
        ) from error


def least_save_bytes(timing: SaveTiming, *, staging_bytes: int | None = None) -> int:
    """What must be left of a host budget, so that no run ends with its first checkpoint.

    Args:
        timing: At once or beside training.
        staging_bytes: As in `SaveRequest`.
    """
    if timing is SaveTiming.AT_ONCE:
        return LEAST_SAVE_BYTES
    return max(BLOCK_BYTES, staging_bytes or 0)
