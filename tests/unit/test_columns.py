"""Columns of a slice: exact sums in a fixed order, picked and put back, whatever the edges."""

from __future__ import annotations

import pytest
import torch

from forebay.model.column_slice import ColumnSlice
from forebay.optim.columns import Columns, column_squares, largest_columns

SHAPE = (9, 7)
SLICES = [(0, 63), (0, 0), (3, 2), (3, 4), (3, 25), (7, 14), (10, 53), (62, 1), (5, 20)]


def _slice(start, elements, shape=SHAPE):
    return ColumnSlice.of(shape, start=start, elements=elements)


@pytest.mark.parametrize(("start", "elements"), SLICES)
def test_sums_are_those_of_each_column(start, elements):
    values = torch.randint(-9, 9, (63,)).float()
    masked = torch.zeros(63)
    masked[start : start + elements] = values[start : start + elements]
    sums = column_squares(values[start : start + elements], _slice(start, elements))
    # whole numbers: any order gives the same
    assert torch.equal(sums, masked.view(SHAPE).double().pow(2).sum(0))


def test_sums_go_by_blocks_of_256_rows_halved():
    values = torch.randn(600, 3)
    sums = column_squares(values, ColumnSlice.of((600, 3), start=0, elements=1800))
    squares = torch.cat([values.double() ** 2, torch.zeros(168, 3, dtype=torch.float64)])
    want = torch.zeros(3, dtype=torch.float64)
    for block in squares.split(256):
        tree = block
        while len(tree) > 1:
            tree = tree[: len(tree) // 2] + tree[len(tree) // 2 :]
        want = want + tree[0]
    assert torch.equal(sums, want)


def test_of_equal_columns_the_first_are_chosen():
    squares = torch.tensor([1.0, 3.0, 2.0, 3.0, 3.0], dtype=torch.float64)
    assert largest_columns(squares, 2).tolist() == [1, 3]
    assert largest_columns(squares, 4).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(("start", "elements"), SLICES)
@pytest.mark.parametrize("chosen", [[0], [2, 3], [6], list(range(7)), [0, 3, 6]])
def test_picked_and_put_back(start, elements, chosen):
    where = _slice(start, elements)
    columns = Columns(where, torch.tensor(chosen))
    flat = torch.randn(elements)
    member = torch.tensor([(start + i) % 7 in chosen for i in range(elements)], dtype=torch.bool)
    compact = columns.pick(flat)
    assert torch.equal(compact, flat[member])
    assert columns.elements == len(compact) <= where.most(len(chosen) / 7 + 1e-9)
    changed = flat.clone()
    columns.put(changed, -compact)
    assert torch.equal(changed[member], -flat[member])
    assert torch.equal(changed[~member], flat[~member])
    assert columns.are_all == bool(member.all())


@pytest.mark.parametrize("shape", [(), (5,)])
def test_without_two_dimensions_all_are_chosen(shape):
    elements = 5 if shape else 1
    where = ColumnSlice.of(shape, start=0, elements=elements)
    columns = Columns(where, None)
    flat = torch.randn(elements)
    assert where.most(0.1) == elements
    assert columns.are_all
    target = torch.zeros(elements)
    columns.put(target, columns.pick(flat))
    assert torch.equal(target, flat)


def test_more_dimensions_are_columns_together():
    assert _slice(0, 24, (2, 3, 4)).columns == 12
    assert _slice(0, 24, (2, 3, 4)).kept(0.25) == 3
    assert _slice(0, 3, (3, 1)).kept(0.1) == 1
