"""Which units' weights come up for which pass of a window: the pool's policy, run on paper.

A steady window is looked at: the passes before it were like it, and its update has made all trained
weights on the device stale. Where no pass was watched, a forward is taken to use units in order, a
backward to use them back to the first that is trained: nothing before it needs a gradient. Where a
model does otherwise, less or more is loaded than is said here.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.plan.foresight import Pass
from forebay.plan.home_bytes import streamed_bytes
from forebay.plan.placement import WeightPlace
from forebay.plan.weight_pool import MoveKind, WeightPool

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from forebay.plan.load_rules import LoadRules
    from forebay.plan.placement import Placement, UnitPlacement
    from forebay.plan.weight_pool import Move

__all__ = ["Load", "Uses", "window_loads"]


# After so many windows each one is as the one before, or nearly so.
_WINDOWS = 4


@dataclass(frozen=True, slots=True)
class Load:
    """One load: for which use it is decided, in which backward's pass of the window (from 0)."""

    kind: Pass
    turn: int
    unit: int


@dataclass(frozen=True, slots=True)
class Uses:
    """Units that come and go, in the order in which each pass uses them; again and again at will.

    Attributes:
        forward: A forward's uses.
        backward: A backward's.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @classmethod
    def expected(
        cls, placement: Placement, *, order: Sequence[int], again: Sequence[int] = ()
    ) -> Uses:
        """What passes are taken to use.

        Args:
            placement: Which units come and go.
            order: What a forward needs, in order.
            again: What it needs once more at its end, where alone backward needs it: embeddings
                that are the output layer too.
        """
        trained = {unit.layout.index for unit in placement.units}
        before = set(itertools.takewhile(lambda unit: unit not in trained, order))
        comes = _that_come(placement)
        used = [unit for unit in order if unit in comes]
        more = [unit for unit in again if unit in comes]
        back = [unit for unit in reversed(used) if unit not in before and unit not in more]
        return cls((*used, *more), (*reversed(more), *back))


def window_loads(placement: Placement, *, uses: Uses) -> list[Load]:
    """The loads of one steady window, each with the pass that first uses what it brings.

    Args:
        placement: Which units stream, and the pool's bytes.
        uses: What its passes use.
    """
    comes = _that_come(placement)
    if not uses.forward:
        return []
    return list(
        _steady_window(
            tuple((index, streamed_bytes(unit.layout)) for index, unit in comes.items()),
            uses=uses,
            trained=tuple(u.layout.index for u in placement.units if u.layout.index in comes),
            capacity_bytes=placement.pool_bytes,
            rules=placement.loads,
            backwards=placement.backwards_per_update,
        )
    )


@functools.lru_cache(maxsize=16)
def _steady_window(
    sizes: tuple[tuple[int, int], ...],
    *,
    uses: Uses,
    trained: tuple[int, ...],
    capacity_bytes: int,
    rules: LoadRules,
    backwards: int,
) -> tuple[Load, ...]:
    """`window_loads` from (index, bytes) of each unit; a planner asks for it often."""
    pool = WeightPool(
        dict(sizes),
        capacity_bytes=capacity_bytes,
        names={index: f"number {index}" for index, _ in sizes},
        rules=rules,
    )
    # The first window fills the order of uses; the second one begins with what its update left, and
    # with frozen weights that another order had brought.
    waiting: set[int] = set()
    found: list[Load] = []
    for _ in range(_WINDOWS):
        for unit in trained:  # the update has made them stale
            waiting.difference_update(move.unit for move in pool.drop(unit))
        before, found = found, _window(pool, uses, waiting=waiting, backwards=backwards)
        if found == before:
            break
    return tuple(found)


def _window(pool: WeightPool, uses: Uses, *, waiting: set[int], backwards: int) -> list[Load]:
    """One window; `waiting` are units that were loaded and not used since, and stays up to date."""
    found: list[Load] = []

    def _note(moves: Iterable[Move]) -> None:
        for move in moves:
            if move.kind is MoveKind.LOAD:
                waiting.add(move.unit)
            else:
                waiting.discard(move.unit)

    pool.foresight.expect(Pass.FORWARD)
    _note(pool.ahead())
    for turn in range(backwards):
        last = turn == backwards - 1
        for kind, units in ((Pass.FORWARD, uses.forward), (Pass.BACKWARD, uses.backward)):
            ends = kind is Pass.BACKWARD
            then = None if ends and last else Pass.FORWARD if ends else Pass.BACKWARD
            pool.begin(kind, then=then)
            for unit in units:
                _note(pool.use(unit))
                if unit in waiting:
                    waiting.discard(unit)
                    found.append(Load(kind, turn, unit))
                _note(pool.ahead())
    return found


def _that_come(placement: Placement) -> dict[int, UnitPlacement]:
    every = (*placement.units, *placement.frozen)
    return {u.layout.index: u for u in every if u.weights is not WeightPlace.DEVICE}
