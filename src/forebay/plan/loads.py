"""Which units' weights come up for which pass of a window: the pool's policy, run on paper.

A steady window is looked at: the passes before it were like it, and its update has made all weights
on the device stale. Passes are taken to use units in the forward's order and back; where a model
does otherwise, or needs no weight in its first backward, less or more is loaded than is said here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.plan.foresight import Pass
from forebay.plan.home_bytes import streamed_bytes
from forebay.plan.placement import WeightPlace
from forebay.plan.weight_pool import MoveKind, WeightPool

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from forebay.plan.load_rules import LoadRules
    from forebay.plan.placement import Placement
    from forebay.plan.weight_pool import Move

__all__ = ["Load", "window_loads"]


@dataclass(frozen=True, slots=True)
class Load:
    """One load: for which use it is decided, in which backward's pass of the window (from 0)."""

    kind: Pass
    turn: int
    unit: int


def window_loads(placement: Placement, *, order: Sequence[int]) -> list[Load]:
    """The loads of one steady window, each with the pass that first uses what it brings.

    Args:
        placement: Which units stream, and the pool's bytes.
        order: Unit indices in the order in which a forward needs them.
    """
    comes = {u.layout.index: u for u in placement.units if u.weights is not WeightPlace.DEVICE}
    used = [unit for unit in order if unit in comes]
    if not used:
        return []
    return list(
        _steady_window(
            tuple((index, streamed_bytes(comes[index].layout)) for index in used),
            capacity_bytes=placement.pool_bytes,
            rules=placement.loads,
            backwards=placement.backwards_per_update,
        )
    )


@functools.lru_cache(maxsize=16)
def _steady_window(
    sizes: tuple[tuple[int, int], ...],
    *,
    capacity_bytes: int,
    rules: LoadRules,
    backwards: int,
) -> tuple[Load, ...]:
    """`window_loads` from (index, bytes) in the order of a forward; a planner asks for it often."""
    pool = WeightPool(
        dict(sizes),
        capacity_bytes=capacity_bytes,
        names={index: f"number {index}" for index, _ in sizes},
        rules=rules,
    )
    used = [index for index, _ in sizes]
    found: list[Load] = []
    # The first window fills the order of uses; the second one begins with what its update left.
    for _ in range(2):
        found = _window(pool, used, backwards=backwards)
    return tuple(found)


def _window(pool: WeightPool, used: Sequence[int], *, backwards: int) -> list[Load]:
    waiting: set[int] = set()
    found: list[Load] = []

    def _note(moves: Iterable[Move]) -> None:
        for move in moves:
            if move.kind is MoveKind.LOAD:
                waiting.add(move.unit)
            else:
                waiting.discard(move.unit)

    for unit in used:
        pool.drop(unit)
    pool.foresight.expect(Pass.FORWARD)
    _note(pool.ahead())
    for turn in range(backwards):
        last = turn == backwards - 1
        for kind, units in ((Pass.FORWARD, used), (Pass.BACKWARD, used[::-1])):
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
