"""Micro-batches in layer order over ranks: the bits of stages 0 and 1, which sum once a window."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distributed import ranks, training, whole_windows
from distributed.training import Recipe
from forebay.plan import UpdatePlace, WeightPlace
from forebay.plan.placement import AccumulationOrder


def _recipes(base: Recipe) -> list[Recipe]:
    """One after the other in stage 1, then layer order in other stages, wherever weights live."""
    layer = replace(base, order=AccumulationOrder.LAYER)
    by_stage = [replace(layer, stage=stage) for stage in (0, 2, 3)]
    streamed = replace(layer, stage=3, weights=WeightPlace.HOST, pool_bytes=40 << 10)
    return [replace(base, stage=1), *by_stage, replace(streamed, unit_elements=1)]


def _more(base: Recipe) -> list[Recipe]:
    layer = replace(base, order=AccumulationOrder.LAYER)
    on_device = [replace(layer, stage=stage, place=UpdatePlace.DEVICE) for stage in (0, 1, 2, 3)]
    streamed = replace(layer, stage=3, weights=WeightPlace.HOST, pool_bytes=40 << 10)
    visits = replace(streamed, place=UpdatePlace.STREAMED)
    return [replace(base, stage=1), *on_device, streamed, visits, replace(visits, unit_elements=1)]


def _assert_same(recipes: list[Recipe]) -> None:
    by_rank = ranks.run(3, training.train_all, recipes)
    usual = by_rank[0][0]
    for results in by_rank:
        for result in results:
            for key in ("norms", "weights", "steps"):
                assert result[key] == usual[key], key


def test_every_stage_has_the_bits_of_sums_made_on_each_rank_first():
    """Addends of each rank in micro-batch order, then ranks in theirs (law 1)."""
    _assert_same(_recipes(Recipe(micro=3, steps=2, dtype=torch.float32)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_matrix(dtype):
    base = Recipe(micro=3, dtype=dtype)
    _assert_same(_recipes(base))
    _assert_same(_more(base))


def test_bytes_between_ranks_are_those_of_one_backward():
    """A sum of a window travels once, in fp32; weights twice, whatever the micro-batches."""
    base = Recipe(stage=3, blocks=6, pool_bytes=2048, order=AccumulationOrder.LAYER)
    two, five = ranks.run(3, training.train_all, [replace(base, micro=n) for n in (2, 5)])[0]
    assert two["bytes"] == five["bytes"]
    block, updates = 2 * 3 * 4096, 3
    assert two["bytes"]["gradients"] == updates * 6 * 2 * block
    assert two["bytes"]["weights"] <= updates * 2 * 6 * block


def test_shared_weights_and_windows_that_are_cut_short():
    usual, layer = ranks.run(3, whole_windows.both_orders)[0]
    assert layer == usual


def test_a_forward_that_raises_on_one_rank_ends_all():
    kinds = [kind for kind, _ in ranks.collect(ranks.start(3, whole_windows.one_rank_fails))]
    assert kinds == ["RankError", "ValueError", "RankError"]
