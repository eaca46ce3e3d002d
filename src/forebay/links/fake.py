"""Copies that are late, out of order or broken, on purpose.

A missing wait then fails in every run instead of once a month. Used by tests and by anyone who
doubts; the bytes still move through the same native lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FaultScript", "FileFaultScript"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultScript:
    """What a scripted copy engine does to each piece.

    Attributes:
        seed: Seed of the delays and of the order among jobs that are ready.
        max_delay_us: Each piece is executed after a delay drawn from [0, this], microseconds.
        fail_at: The piece on its way down, counted from 0, that fails; -1 for none.
        fail_up_at: The piece on its way up that fails; -1 for none.
        fail_load_at: The piece of weights fetched for a pass that fails; -1 for none.
        fail_text: The failure's text.
    """

    seed: int
    max_delay_us: int = 0
    fail_at: int = -1
    fail_up_at: int = -1
    fail_load_at: int = -1
    fail_text: str = "scripted failure"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFaultScript:
    """What a scripted file backend does to each block.

    Attributes:
        seed: Seed of the delays and of the order of completions.
        max_delay_us: Completions are late by up to this, microseconds, and out of order.
        fail_at: The block, counted from 0, that fails; -1 for none.
        fail_errno: How it fails; 5 is EIO.
        short_at: The block that transfers only a part; -1 for none.
        short_bytes: How much of it.
    """

    seed: int = 0
    max_delay_us: int = 0
    fail_at: int = -1
    fail_errno: int = 5
    short_at: int = -1
    short_bytes: int = 4096
