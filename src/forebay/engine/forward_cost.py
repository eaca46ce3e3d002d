"""What evaluation and generation cost where weights come and go: said once they are over."""

from __future__ import annotations

import logging

from forebay.units_of_measure import counted, format_bytes

__all__ = ["ForwardCost"]

_log = logging.getLogger("forebay")


class ForwardCost:
    """Counts forwards without gradients, and what they bring to the device."""

    def __init__(self) -> None:
        self._forwards = 0
        self._before_bytes = 0

    def begins(self, brought_bytes: int) -> None:
        """A forward without gradients begins.

        Args:
            brought_bytes: What came to the device so far, since the engine began.
        """
        if not self._forwards:
            self._before_bytes = brought_bytes
        self._forwards += 1

    def over(self, brought_bytes: int) -> None:
        """There are no more for now. Where all weights had stayed there is nothing to say."""
        moved = brought_bytes - self._before_bytes
        if self._forwards and moved:
            _log.info(
                "%s without gradients brought %s of weights to the device, %s each",
                counted(self._forwards, "forward"),
                format_bytes(moved),
                format_bytes(moved // self._forwards),
            )
        self._forwards = 0
