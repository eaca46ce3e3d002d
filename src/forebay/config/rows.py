"""The lines of a printed configuration, and where each value comes from."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Row", "Source"]


class Source(enum.Enum):
    """Where a resolved value comes from."""

    GIVEN = "given"
    """The configuration says it."""
    DEFAULT = "default"
    """Nobody says anything else."""
    AUTO = "auto"
    """The configuration says "auto"; this is the answer."""
    CALLER = "caller"
    """The configuration leaves it out; the command line, the model or the program knows it."""
    DERIVED = "derived"
    """It follows from other values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the printed configuration.

    Attributes:
        path: The key.
        value: Its value as text; sizes with their unit.
        source: Where it comes from.
        note: What a reader should know, for example why the key changes nothing here.
    """

    path: str
    value: str
    source: Source
    note: str = ""
