"""Which units' gradients can be believed to be complete when they seem so.

A gradient counts as complete when every parameter of its unit has fired as often as in the last
backward. That is a hint: a later addend, another backward or a branch not taken make it wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.engine.record import GradientState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.engine.unit import Unit

__all__ = ["Steadiness"]

# Windows without a late addend after which a unit's complete gradient is believed to be complete.
_STEADY = 2
_PRESENT = (GradientState.OPEN, GradientState.LANDED)


class Steadiness:
    """Counts the windows in a row in which nothing came after a unit's complete gradient.

    Args:
        units: Every unit by index.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._windows = [0] * len(units)
        self._complete: set[int] = set()
        self._disturbed: set[int] = set()

    def begin_backward(self) -> None:
        """Whatever was complete is not: more comes."""
        self._disturbed |= self._complete

    def complete(self, unit: Unit) -> bool:
        """Whether every parameter of a unit has a gradient, and for the first time in the window.

        Units whose parameters do not all get one (experts, branches) are never steady.
        """
        if unit.index in self._complete or any(r.state not in _PRESENT for r in unit.records):
            return False
        self._complete.add(unit.index)
        return True

    def disturb(self, unit: Unit) -> None:
        """Something came for a unit after its gradient was complete."""
        self._disturbed.add(unit.index)

    def is_steady(self, unit: Unit) -> bool:
        """Whether the last windows give reason to believe."""
        return self._windows[unit.index] >= _STEADY

    def end_window(self) -> None:
        """Learn from the window that ends."""
        for index, count in enumerate(self._windows):
            steady = index in self._complete and index not in self._disturbed
            self._windows[index] = count + 1 if steady else 0
        self.forget_window()

    def forget_window(self) -> None:
        """A window begins."""
        self._complete.clear()
        self._disturbed.clear()
