"""How many backwards a window has: told, or learned and planned for once it is known."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from forebay.engine.build import accumulation_for
from forebay.errors import BudgetError, ForebayWarning
from forebay.plan.placement import Accumulation
from forebay.plan.program import build_program

if TYPE_CHECKING:
    from forebay.engine.engine import Engine

__all__ = ["LearnedSums"]


class LearnedSums:
    """Plans for sums of as many backwards as windows have shown."""

    def __init__(self) -> None:
        # Backwards per update whose sums do not fit; they are made one by one, or refused.
        self._too_many = 0

    def expect(self, engine: Engine, count: int) -> None:
        """See `Engine.expect_backwards`."""
        options = replace(engine.options, backwards=count)
        accumulation, count = accumulation_for(options), options.backwards_per_update
        if accumulation is not Accumulation.SINGLE:
            engine.quiesce("a change of the accumulation steps")
            for unit in engine.units:
                for part in unit.parts:
                    part.prepare_sums()
        for unit in engine.units:
            unit.accumulation = accumulation
        engine.placement = replace(
            engine.placement,
            accumulation=accumulation,
            backwards_per_update=count,
            micro_batches=options.micro_batches,
        )
        engine.collector.window.expected = count
        engine.collector.program = build_program(engine.placement, order=engine.order)

    def plan(self, engine: Engine) -> None:
        """Called after every update."""
        learned = engine.collector.window.learned
        if learned <= max(engine.placement.backwards_per_update, self._too_many):
            return
        try:
            self.expect(engine, learned)
        except BudgetError as error:
            self._too_many = learned
            warnings.warn(
                f"{learned} backwards per update cannot be planned for: {error}",
                ForebayWarning,
                stacklevel=5,
            )
