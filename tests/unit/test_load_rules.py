"""What bounds weights that come and go beside their room: how far ahead, how long after, which."""

from __future__ import annotations

import pytest

from forebay.plan.foresight import Pass
from forebay.plan.load_rules import LoadRules
from forebay.plan.weight_pool import MoveKind, WeightPool


def _run(rules: LoadRules, *, units: int = 5, room: int = 50) -> tuple[list[int], list[int]]:
    """Units that are there at each use of a second forward, and those that come with each use."""
    sizes = dict.fromkeys(range(units), 10)
    names = {unit: str(unit) for unit in sizes}
    pool = WeightPool(sizes, capacity_bytes=room, names=names, rules=rules)
    there, loads = [], []
    for step in range(2):
        pool.begin(Pass.FORWARD, then=Pass.FORWARD)
        for unit in sizes:
            moves = [*pool.use(unit), *pool.ahead()]
            if step:
                there.append(len(pool.here))
                loads.append(sum(move.kind is MoveKind.LOAD for move in moves))
    return there, loads


@pytest.mark.parametrize(
    ("rules", "there", "loads"),
    [
        (LoadRules(), [5, 5, 5, 5, 5], [0, 0, 0, 0, 0]),
        # the unit that is used and the one that was used last, whose next use is too far
        (LoadRules(reuse_bytes=0, ahead_bytes=0), [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]),
        # one comes ahead of its use, since 1 byte is less than it has
        (LoadRules(reuse_bytes=0, ahead_bytes=1), [2, 2, 2, 2, 2], [1, 1, 1, 1, 1]),
        (LoadRules(reuse_bytes=0, ahead_bytes=20), [3, 3, 3, 3, 3], [1, 1, 1, 1, 1]),
        # all five lie between two uses of a unit
        (LoadRules(reuse_bytes=50), [5, 5, 5, 5, 5], [0, 0, 0, 0, 0]),
    ],
)
def test_loads_keep_to_the_rules(rules, there, loads):
    assert _run(rules) == (there, loads)


def test_small_units_stay_while_there_is_room_for_them():
    assert LoadRules().stay([1, 2]) == (False, False)
    rules = LoadRules(persistent_elements=5)
    assert rules.stay([5, 6, 0, 4]) == (True, False, True, True)
    rules = LoadRules(persistent_elements=5, persistent_total=8)
    assert rules.stay([5, 6, 4, 3]) == (True, False, False, True)
