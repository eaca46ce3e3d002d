"""Reads of weights that were not on the device: by whom nobody knows, so they gave NaN.

A weight that is kept in a list or a closure is read without asking its module for it, and may be
away by then though its module was called before. Two see it: saved-tensor hooks, where autograd
saves what stands for the weight, and the graph of a forward, where a node that reads the weight
has a number from a time in which its unit was away. A graph is looked at in the first forwards
and in the one after a step that was skipped; a checkpointed region hides its reads from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay.engine.reads import next_number, reads_since
from forebay.engine.unit import WeightState
from forebay.errors import PendingWeightError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from forebay.engine.unit import NanSource, Unit

__all__ = ["AwayReads", "away_read_error"]

# Forwards whose graph is looked at: in the first one units come up that later ones find there.
_GRAPHS = 2


def away_read_error(label: str, *, seen: str) -> PendingWeightError:
    """The error for a weight that was read while it was away.

    Args:
        label: The weight's name.
        seen: How it is known.
    """
    return PendingWeightError(
        f"{label} was read while it was not on the device, and shows NaN there: {seen}, but nobody "
        "asked its module for the weight",
        hint="read it as module.weight inside a forward, or declare the module that reads it with "
        "forebay.zero.register_external_parameter(module, weight)",
    )


class AwayReads:
    """Finds them; used in the thread of the forward.

    Args:
        units: Those whose weights come and go.
        nans: What weights that are away view.

    Attributes:
        storages: Identities of the memory that they view then.
    """

    def __init__(self, units: Sequence[Unit], *, nans: NanSource) -> None:
        self._units = units
        self.storages = nans.storages
        self._left = _GRAPHS
        self._begin: int | None = None
        # For each unit, from which node on it was there, or was not.
        self._moves: dict[int, list[tuple[int, bool]]] = {}

    def suspect(self) -> None:
        """A gradient was not finite: look at the next forward."""
        self._left = max(self._left, 1)

    def begin(self) -> None:
        """A forward of the whole model begins, with gradients."""
        self._moves.clear()
        self._begin = next_number() if self._left else None

    def moved(self, unit: Unit) -> None:
        """A unit's weights have arrived, or gone."""
        if self._begin is not None:
            is_here = unit.state is WeightState.READY
            self._moves.setdefault(unit.index, []).append((next_number(), is_here))

    def end(self, outputs: Iterable[torch.Tensor]) -> None:
        """That forward has ended.

        Raises:
            PendingWeightError: It read a weight that was away.
        """
        begin, self._begin = self._begin, None
        if begin is None:
            return
        self._left -= 1
        members = {id(r.param): (r.label, unit) for unit in self._units for r in unit.records}
        for leaf, number in reads_since(outputs, begin=begin):
            label, unit = members.get(leaf, ("", None))
            if unit is not None and not self._was_here(unit, number):
                raise away_read_error(label, seen="the graph of this forward reads it then")

    def _was_here(self, unit: Unit, number: int) -> bool:
        moves = self._moves.get(unit.index)
        if not moves:
            return unit.state is WeightState.READY
        before = [is_here for since, is_here in moves if since <= number]
        return before[-1] if before else not moves[0][1]

    def refuse_saved(self, tensor: torch.Tensor) -> None:
        """Look at a tensor that autograd saves.

        Raises:
            PendingWeightError: It is (a view of) what a weight that is away shows.
        """
        address = tensor.data_ptr()
        for unit in self._units:
            for record in unit.records:
                if record.away is not None and record.away.data_ptr() == address:
                    raise away_read_error(record.label, seen="backward is to use what was read")
