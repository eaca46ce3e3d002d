"""The exact policy: everything updates in the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.engine.policy import UpdatePolicy

if TYPE_CHECKING:
    from forebay.engine.executor import Executor
    from forebay.engine.terms import UpdateOrder
    from forebay.plan.program import Program

__all__ = ["ExactUpdates"]


class ExactUpdates(UpdatePolicy):
    """Updates when the step is decided.

    Args:
        executor: Carries out the updates.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def apply(self, program: Program, order: UpdateOrder) -> None:
        """See `UpdatePolicy`."""
        self._executor.update_all(program, order)
