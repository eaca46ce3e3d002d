"""Blocks' inputs that wait on the host: when they leave in a forward and come back in a backward.

As `forebay.engine.activations` moves them: each leaves once its block has computed, but the last
block's; forward waits before a third is on its way; backward brings up those of the next blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.plan.activations import ON_THEIR_WAY
from forebay.plan.ops import Lane, Op, OpKind, Trigger, TriggerKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["InputMoves"]


class InputMoves:
    """The moves of one forward and its backward.

    Args:
        inputs: Bytes that each unit's input moves each way; units without any are left out.
        order: Units in the order of the forward.
        micro_batches: That pass each block before the next one: of several inputs of a block all
            but the last two have left when it ends.
        add: Makes a task of an operation that follows these tasks; returns its number.
    """

    def __init__(
        self,
        inputs: Mapping[int, int],
        *,
        order: Sequence[int],
        micro_batches: int,
        add: Callable[[Op, tuple[int, ...]], int],
    ) -> None:
        self._inputs = inputs
        self._back = [unit for unit in reversed(order) if inputs.get(unit)]
        self._places = {unit: place for place, unit in enumerate(reversed(order))}
        self._most = ON_THEIR_WAY if micro_batches == 1 else ON_THEIR_WAY - 1
        self._add = add
        self._down: dict[int, int] = {}
        self._up: dict[int, int] = {}

    def before_forward(self) -> tuple[int, ...]:
        """What has to be gone before a block computes."""
        sent = list(self._down.values())
        return tuple(sent[-self._most - 1 : -self._most])

    def computed(self, unit: int, *, by: int) -> None:
        """A unit's forward is done by a task: its input leaves."""
        if self._inputs.get(unit):
            op = self._op(unit, Lane.DOWN, TriggerKind.FORWARD_USE)
            self._down[unit] = self._add(op, (by,))

    def before_backward(self, unit: int, *, after: tuple[int, ...]) -> tuple[int, ...]:
        """What has to be back before a unit's backward, which follows these tasks.

        Those of the next blocks come up beside it.
        """
        place = self._places[unit]
        wanted = [one for one in self._back if self._places[one] > place][:ON_THEIR_WAY]
        for one in (unit, *wanted):
            if one in self._down and one not in self._up:
                op = self._op(one, Lane.UP, TriggerKind.BACKWARD_USE)
                self._up[one] = self._add(op, (*after, self._down[one]))
        return (self._up[unit],) if unit in self._up else ()

    def _op(self, unit: int, lane: Lane, kind: TriggerKind) -> Op:
        return Op(
            kind=OpKind.ACTIVATION,
            lane=lane,
            unit=unit,
            nbytes=self._inputs[unit],
            trigger=Trigger(kind, unit),
        )
