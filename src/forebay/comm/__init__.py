"""Ranks: who they are, what they exchange, in which order, and how one that is gone is noticed.

`torch.distributed` carries every byte; nothing here opens a socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Says where collectives are, to scripts that look for those of `deepspeed.comm` here."""
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r} (for collectives use torch.distributed)"
        )
