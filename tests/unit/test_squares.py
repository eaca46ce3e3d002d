"""The tree that sums squares: its exact shape, and what follows from it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from forebay.optim import squares
from forebay.optim.squares import BLOCK, square_sum, tree_sum

SIZES = [0, 1, 2, 3, 199, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 17]


def tree(values: list[float]) -> float:
    """The definition, in plain Python."""
    if not values:
        return 0.0
    while True:
        values = values + [0.0] * (-len(values) % BLOCK)
        sums = []
        for start in range(0, len(values), BLOCK):
            block = values[start : start + BLOCK]
            while len(block) > 1:
                half = len(block) // 2
                block = [block[i] + block[i + half] for i in range(half)]
            sums += block
        if len(sums) == 1:
            return sums[0]
        values = sums


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_definition(size, dtype):
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=generator)
    values = (values * 10.0 ** torch.randint(-4, 4, (size,), generator=generator)).to(dtype)
    result = square_sum(values)
    assert result.dtype is torch.float64
    assert result.shape == ()
    assert float(result) == tree([float(value) ** 2 for value in values])


def test_block_sums_are_summed_by_the_same_tree():
    values = [math.sin(i) for i in range(BLOCK + 3)]
    assert float(tree_sum(torch.tensor(values, dtype=torch.float64))) == tree(values)
    assert float(tree_sum(torch.tensor([-3.5], dtype=torch.float64))) == -3.5


def test_three_levels():
    """More than 4096 blocks."""
    values = torch.zeros(BLOCK * BLOCK + 5)
    values[0], values[4097], values[-1] = 3.0, 4.0, 12.0
    assert float(square_sum(values)) == 169.0


def test_chunks_do_not_show(monkeypatch):
    values = torch.randn(9 * BLOCK + 5, generator=torch.Generator().manual_seed(0))
    whole = square_sum(values)
    monkeypatch.setattr(squares, "_BLOCKS_AT_ONCE", 1)
    assert square_sum(values) == whole


def test_is_close_to_the_true_sum():
    values = torch.randn(70_001, generator=torch.Generator().manual_seed(1))
    exact = math.fsum(float(value) ** 2 for value in values)
    # Pairwise: one rounding on each of 12 + 5 levels, all terms positive.
    assert float(square_sum(values)) == pytest.approx(exact, rel=17 * 2.0**-53, abs=0)


def test_subnormals_and_large_values_count():
    tiny = np.float32(2.0**-149)
    assert float(square_sum(torch.tensor([tiny, tiny]))) == 2.0**-297
    huge = torch.finfo(torch.float32).max
    assert float(square_sum(torch.full((5,), huge))) == pytest.approx(5 * huge**2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5000, -1])
def test_one_value_that_is_not_finite_shows(bad, place):
    """So the check for overflow costs no pass over the gradients of its own."""
    values = torch.zeros(3 * BLOCK)
    values[place] = bad
    assert not math.isfinite(float(square_sum(values)))


def test_shape_and_strides_do_not_matter():
    values = torch.randn(60, 70, generator=torch.Generator().manual_seed(2))
    assert square_sum(values) == square_sum(values.reshape(-1))
    assert square_sum(values.t()) == square_sum(values.t().contiguous())
    assert float(square_sum(torch.tensor(3.0))) == 9.0


def test_input_is_unchanged_and_needs_no_graph():
    values = torch.ones(10, requires_grad=True)
    assert not square_sum(values).requires_grad
    assert values.tolist() == [1.0] * 10
