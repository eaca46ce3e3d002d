"""The pool's policy: within its capacity, what is used is there, nothing is loaded for nothing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.plan.foresight import Pass
from forebay.plan.weight_pool import MoveKind, WeightPool

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=9)


class _Mirror:
    """Carries moves out and counts."""

    def __init__(self, pool: WeightPool) -> None:
        self.pool = pool
        self.here: set[int] = set()
        self.loads = 0

    def carry_out(self, moves) -> None:
        for move in moves:
            if move.kind is MoveKind.LOAD:
                assert move.unit not in self.here
                self.here.add(move.unit)
                self.loads += 1
            else:
                assert move.unit in self.here
                self.here.discard(move.unit)
            assert sum(self.pool._sizes[unit] for unit in self.here) <= self.pool.capacity_bytes
        assert self.here == self.pool.here


def _pool(sizes: list[int], spare: int) -> WeightPool:
    return WeightPool(
        dict(enumerate(sizes)),
        capacity_bytes=max(sizes) + spare,
        names={index: str(index) for index in range(len(sizes))},
    )


@settings(deadline=None)
@given(SIZES, st.integers(0, 40), st.data())
def test_any_order_of_uses(sizes, spare, data):
    """An unexpected order costs loads, never a wrong unit."""
    pool = _pool(sizes, spare)
    mirror = _Mirror(pool)
    kinds = data.draw(st.lists(st.sampled_from(list(Pass)), max_size=5))
    for kind in kinds:
        pool.begin(kind, then=data.draw(st.sampled_from([*Pass, None])))
        for unit in data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=12)):
            mirror.carry_out(pool.use(unit))
            assert unit in mirror.here
            mirror.carry_out(pool.ahead())
            assert unit in mirror.here, "the unit in use was let go for another"
        if data.draw(st.booleans()):
            for unit in range(len(sizes)):
                mirror.carry_out(pool.drop(unit))


@settings(deadline=None)
@given(SIZES, st.integers(0, 60), st.integers(1, 3))
def test_a_steady_order(sizes, spare, backwards):
    """Each pass loads each unit at most once; where one more fits, nothing is late."""
    pool = _pool(sizes, spare + max(sizes))
    mirror = _Mirror(pool)
    units = list(range(len(sizes)))
    late = []
    for _ in range(3):
        before, loads = pool.late, mirror.loads
        for unit in units:
            mirror.carry_out(pool.drop(unit))
        pool.foresight.expect(Pass.FORWARD)
        mirror.carry_out(pool.ahead())
        for turn in range(backwards):
            pool.begin(Pass.FORWARD, then=Pass.BACKWARD)
            for unit in units:
                mirror.carry_out(pool.use(unit))
                mirror.carry_out(pool.ahead())
            pool.begin(Pass.BACKWARD, then=None if turn == backwards - 1 else Pass.FORWARD)
            for unit in reversed(units):
                mirror.carry_out(pool.use(unit))
                mirror.carry_out(pool.ahead())
        late.append(pool.late - before)
        assert mirror.loads - loads <= 2 * backwards * len(units)
        if sum(sizes) <= pool.capacity_bytes:
            assert mirror.loads - loads == len(units)
    assert late[1:] == [0, 0]
