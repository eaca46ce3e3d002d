"""Squares over ranks: the bits of one tree over all blocks, wherever slices cut them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.engine.shared_squares import PartBlocks, SharedSquares
from forebay.optim.squares import BLOCK, row_sums, tree_sum

# Blocks of a parameter: none, one, below, at and above a group, and several groups.
_SIZES = st.sampled_from([0, 1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5])


def _parts(sizes_of_parts, *, sharers):
    """Parts of parameters that follow each other, filled up to equal slices."""
    parts, index = [], 0
    for number, sizes in enumerate(sizes_of_parts):
        spans, at = {}, 0
        for size in sizes:
            spans[index] = at, at + size
            index, at = index + 1, at + size
        parts.append(PartBlocks(key=(number, 0), each=-(-at // sharers), spans=spans))
    return parts


def _slices(parts, values, *, rank):
    return {part.key: values[part.key][rank * part.each : (rank + 1) * part.each] for part in parts}


@given(
    sizes=st.lists(st.lists(_SIZES, max_size=4), max_size=3),
    sharers=st.integers(1, 5),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_slices_give_the_bits_of_the_whole_tree(sizes, sharers, seed):
    parts = _parts(sizes, sharers=sharers)
    generator = torch.Generator().manual_seed(seed)
    values = {
        part.key: torch.rand(part.each * sharers, generator=generator, dtype=torch.float64).exp()
        for part in parts
    }
    ranks = [SharedSquares(parts, sharers=sharers, shard=rank) for rank in range(sharers)]
    rows = torch.stack(
        [one.told(_slices(parts, values, rank=rank)) for rank, one in enumerate(ranks)]
    )
    expected = {
        index: float(tree_sum(values[part.key][first:last]))
        for part in parts
        for index, (first, last) in part.spans.items()
    }
    assert all(one.sums(rows) == expected for one in ranks)


def test_a_group_that_one_rank_has_travels_as_one_number():
    def length(sharers):
        parts = _parts([[3 * BLOCK + 5, 9]], sharers=sharers)
        return SharedSquares(parts, sharers=sharers, shard=0).length

    assert length(1) == 5
    # The cut goes through the second group: each rank tells the part of it that it has.
    assert length(2) < 3 + BLOCK


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("place", [0, BLOCK + 3, 2 * BLOCK + 1])
def test_what_is_not_finite_is_seen_on_every_rank(bad, place):
    parts = _parts([[5, 2 * BLOCK]], sharers=3)
    values = {(0, 0): torch.ones(3 * parts[0].each, dtype=torch.float64)}
    values[0, 0][place] = bad
    ranks = [SharedSquares(parts, sharers=3, shard=rank) for rank in range(3)]
    rows = torch.stack([r.told(_slices(parts, values, rank=n)) for n, r in enumerate(ranks)])
    found = ranks[1].sums(rows)
    assert [torch.tensor(found[n]).isfinite().item() for n in (0, 1)] == [place != 0, place == 0]


def test_a_part_without_gradients_counts_as_zeros():
    parts = _parts([[9], [BLOCK + 1]], sharers=2)
    one = SharedSquares(parts, sharers=2, shard=0)
    told = one.told({(0, 0): torch.full((parts[0].each,), 2.0, dtype=torch.float64)})
    assert one.sums(torch.stack([told, torch.zeros_like(told)])) == {0: 10.0, 1: 0.0}


def test_rows_beyond_a_group_of_groups_are_summed_by_the_same_tree():
    rows = torch.rand(2, 2 * BLOCK + 3, dtype=torch.float64)
    assert torch.equal(row_sums(rows), torch.stack([tree_sum(row) for row in rows]))
    whole = torch.zeros(3 * BLOCK, dtype=torch.float64)
    whole[: 2 * BLOCK + 3] = rows[0]
    tree = whole.view(3, BLOCK)
    while tree.shape[1] > 1:
        tree = tree[:, : tree.shape[1] // 2] + tree[:, tree.shape[1] // 2 :]
    assert row_sums(rows)[0] == (tree[0, 0] + tree[2, 0]) + tree[1, 0]
