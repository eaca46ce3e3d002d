"""Every rank updates as much of a unit as any other: what `round_robin_gradients` is for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.model.layout import SHARDED_ALIGNMENT_ELEMENTS, PartLayout, layout_unit
from forebay.model.spec import ParamSpec


def _part(shapes: list[tuple[int, ...]], ranks: int) -> PartLayout:
    params = [
        ParamSpec(index=i, names=(f"p{i}",), shape=shape, dtype="bfloat16", group=0)
        for i, shape in enumerate(shapes)
    ]
    return layout_unit("unit", index=0, params=params, world_size=ranks).parts[0]


def _updated(part: PartLayout, rank: int) -> int:
    """Elements that a rank's update touches."""
    shard = part.shard(rank)
    return sum(shard.segment(slot).elements for slot in part.slots)


@given(st.lists(st.integers(0, 50_000), min_size=1, max_size=8), st.integers(2, 9))
def test_slices_of_a_unit_are_equal_and_hold_every_element_once(sizes, ranks):
    part = _part([(size,) for size in sizes], ranks)
    assert {part.shard(rank).elements for rank in range(ranks)} == {part.elements // ranks}
    assert sum(_updated(part, rank) for rank in range(ranks)) == sum(sizes)
    # what is padded so that slices are equal is less than one block of each rank
    blocks = sum(-(-size // SHARDED_ALIGNMENT_ELEMENTS) for size in sizes)
    assert part.elements // SHARDED_ALIGNMENT_ELEMENTS - blocks < ranks


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
def test_no_rank_updates_more_than_its_share_of_a_llama_block_by_two_blocks(ranks):
    norms, square, wide = (4096,), (4096, 4096), (11008, 4096)
    part = _part([*[square] * 4, *[wide] * 3, norms, norms], ranks)
    work = [_updated(part, rank) for rank in range(ranks)]
    assert max(work) < sum(work) / ranks + 2 * SHARDED_ALIGNMENT_ELEMENTS
