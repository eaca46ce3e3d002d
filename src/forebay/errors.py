"""forebay's exceptions: one tree, so that `except ForebayError` catches all that is ours.

    ForebayError
    |-- ConfigError (also ValueError)     a key, value or combination is refused
    |-- BudgetError (also MemoryError)    bytes do not fit a tier's budget; nothing was allocated
    |-- UnsupportedError (also TypeError) a model, optimizer or call that forebay cannot honour
    |-- GradientError (also RuntimeError) a gradient was read, written or produced in a way that
    |                                     would train silently wrong
    |-- PendingWeightError (RuntimeError) a weight was read while its new value was on its way
    |-- EngineClosedError (RuntimeError)  the engine is closed, by the user or by a failure
    |-- TransferError (also OSError)      a copy, disk access or worker failed during an update
    |-- RankError (also RuntimeError)     a rank is gone, has failed, or does something else
    |-- StateAwayError (RuntimeError)     state that is needed has left by offload_states()
    |-- StorageError (also OSError)       a folder for state on NVMe is missing, read-only or full
    `-- CheckpointError (also ValueError) a checkpoint cannot be written, is missing, incomplete or
                                          not what it says

    ForebayWarning (UserWarning)          said once; training goes on and stays right

A message says what failed, with the two numbers and their units, then a line `hint: ...`.
"""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "EngineClosedError",
    "ForebayError",
    "ForebayWarning",
    "GradientError",
    "PendingWeightError",
    "RankError",
    "StateAwayError",
    "StorageError",
    "TransferError",
    "UnsupportedError",
]


class ForebayError(Exception):
    """Base of every exception that forebay raises on purpose.

    Args:
        message: What failed, in one sentence, with numbers and units.
        hint: What the user can do about it; printed on its own line.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = message
        self.hint = hint
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")


class ConfigError(ForebayError, ValueError):
    """A configuration key, value or combination is refused."""


class BudgetError(ForebayError, MemoryError):
    """Bytes do not fit a tier's budget; raised before anything is allocated."""


class UnsupportedError(ForebayError, TypeError):
    """A model, optimizer or call that forebay cannot honour."""


class GradientError(ForebayError, RuntimeError):
    """A gradient was used in a way that would train silently wrong."""


class PendingWeightError(ForebayError, RuntimeError):
    """A weight was read while its new value was still on its way."""


class EngineClosedError(ForebayError, RuntimeError):
    """The engine is closed, by the user or by a failure during an update."""


class _FailedSystemError(ForebayError, OSError):
    """What the system refused or failed to do."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.strerror = message  # what an error that wraps it gives as its reason

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class TransferError(_FailedSystemError):
    """A copy, disk access or worker thread failed during an update."""


class RankError(ForebayError, RuntimeError):
    """Another rank is gone, has failed, or does something else than this one."""


class StateAwayError(ForebayError, RuntimeError):
    """State that is needed has left the device by `offload_states()`."""


class StorageError(_FailedSystemError):
    """A folder for state on NVMe is missing, cannot be written or has no room."""


class CheckpointError(ForebayError, ValueError):
    """A checkpoint cannot be written, is missing, incomplete or not what it says."""


class ForebayWarning(UserWarning):
    """Something is slower or smaller than asked; the results stay right."""
