"""How many backwards a window has, where nobody says: learned, and planned for once it is known."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from forebay.errors import BudgetError, ForebayWarning

if TYPE_CHECKING:
    from forebay.engine.engine import Engine

__all__ = ["LearnedSums"]


class LearnedSums:
    """Plans for sums of as many backwards as windows have shown."""

    def __init__(self) -> None:
        # Backwards per update whose sums do not fit; they are made one by one, or refused.
        self._too_many = 0

    def plan(self, engine: Engine) -> None:
        """Called after every update."""
        learned = engine.collector.window.learned
        if learned <= max(engine.placement.backwards_per_update, self._too_many):
            return
        try:
            engine.expect_backwards(learned)
        except BudgetError as error:
            self._too_many = learned
            warnings.warn(
                f"{learned} backwards per update cannot be planned for: {error}",
                ForebayWarning,
                stacklevel=5,
            )
