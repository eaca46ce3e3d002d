"""The square-sum tree against its definition, and folds against plain additions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from unit.native_cases import (
    SIZES,
    SPECIAL,
    address,
    canonical,
    narrow,
    placed,
    random_state,
    square_tree,
    widen,
)

DTYPES = ["float32", "bfloat16", "float16"]


def _values(elements: int, seed: int) -> np.ndarray:
    return random_state(elements, seed)[3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tree_is_the_definition(core, pool, dtype):
    lists = [narrow(_values(n, seed), dtype) for seed, n in enumerate([*SIZES, 4096 * 3 + 5])]
    lists = [placed(values, shift) for shift, values in enumerate(lists)]
    ticket = pool.square_sums([(address(v), v.size) for v in lists], dtype)
    assert ticket.results() == [square_tree(widen(v, dtype)) for v in lists]


def test_lists_longer_than_a_block_of_blocks(native):
    """4096 blocks and one element more need a third level."""
    values = np.tile(_values(1 << 20, 1), 17)[: 4096 * 4096 + 1]
    wanted = square_tree(values)
    for threads in (1, 3):
        pool = native.Pool(threads, [])
        assert pool.square_sums([(address(values), values.size)], "float32").results() == [wanted]
        pool.close()


def test_overflow_and_nan_are_seen(core, pool):
    for bad in (np.inf, -np.inf, np.nan):
        values = np.ones(10_000, np.float32)
        values[7777] = bad
        total = pool.square_sums([(address(values), values.size)], "float32").results()[0]
        assert not math.isfinite(total)
    large = np.full(10_000, 3e38, np.float32)  # fp32 squares would overflow
    assert math.isfinite(pool.square_sums([(address(large), 10_000)], "float32").results()[0])
    tiny = np.full(64, 1e-45, np.float32)
    assert pool.square_sums([(address(tiny), 64)], "float32").results()[0] > 0


def test_no_spans_give_no_sums(core, pool):
    assert pool.square_sums([], "float32").results() == []
    assert pool.square_sums([(0, 0)], "float32").results() == [0.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_folds_are_additions_in_order(core, pool, dtype):
    for seed, elements in enumerate(SIZES):
        addends = [narrow(_values(elements, 10 * seed + i), dtype) for i in range(3)]
        for values in addends:
            values[: SPECIAL.size] = narrow(SPECIAL, dtype)[: values.size]
        sums = np.full(elements, np.nan, np.float32)
        ticket = None
        for index, values in enumerate(addends):
            spans = [(address(sums), address(values), elements)]
            after = [ticket] if ticket else []
            ticket = pool.fold(spans, dtype, index == 0, after)
        assert ticket.wait(30)
        with np.errstate(all="ignore"):
            wanted = widen(addends[0], dtype) + widen(addends[1], dtype) + widen(addends[2], dtype)
        assert np.array_equal(canonical(sums), canonical(wanted))


def test_a_fold_keeps_what_lies_between_its_spans(core, pool):
    sums = np.arange(100, dtype=np.float32)
    source = np.ones(100, np.float32)
    spans = [(address(sums), address(source), 3), (address(sums[50:]), address(source), 7)]
    assert pool.fold(spans, "float32", False).wait(30)
    wanted = np.arange(100, dtype=np.float32)
    wanted[:3] += 1
    wanted[50:57] += 1
    assert np.array_equal(sums, wanted)
