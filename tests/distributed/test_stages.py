"""Stages, places and unit sizes give the same bits at one world size, and those of the definition.

Two ranks would hide the order of sums, so there are three and four.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distributed import ranks, training
from distributed.definition import by_definition
from distributed.training import Recipe, variants
from forebay.model.layout import SHARDED_ALIGNMENT_ELEMENTS
from forebay.optim.squares import BLOCK
from forebay.plan import UpdatePlace, WeightPlace


def _assert_same(results):
    for other in results[1:]:
        for key in ("norms", "weights", "steps"):
            assert other[key] == results[0][key], key


def test_three_ranks_agree_with_each_other_and_with_the_definition():
    """One backward per update: every stage, place and unit size, clipping on."""
    recipes = variants(Recipe())
    streamed = replace(recipes[0], stage=3, weights=WeightPlace.HOST)
    recipes += [streamed, replace(streamed, place=UpdatePlace.STREAMED)]
    by_rank = ranks.run(3, training.train_all, recipes)
    _assert_same([result for results in by_rank for result in results])
    norms, weights = by_definition(recipes[0], size=3)
    first = by_rank[0][0]
    assert (first["norms"], first["weights"]) == (norms, weights)
    assert min(norms) < recipes[0].clip < max(norms)  # clipping is active and idle


def test_accumulation_on_four_ranks():
    """Stages 0 and 1 sum over ranks once a window, 2 and 3 after every backward (law 1b)."""
    base = Recipe(micro=3, dtype=torch.float32)
    per_window = [v for v in variants(base) if v.stage < 2][::2]
    every = [v for v in variants(base) if v.stage >= 2][::3]
    streamed = replace(base, stage=1, place=UpdatePlace.STREAMED)
    results = ranks.run(4, training.train_all, [*per_window, streamed, *every])[0]
    first, second = results[: len(per_window) + 1], results[len(per_window) + 1 :]
    _assert_same(first)
    _assert_same(second)
    assert first[0]["weights"] != second[0]["weights"]  # else this compares nothing


def test_bytes_between_ranks_are_zeros():
    """Stages 1 and 2 move 2M an update: gradients once, weights once. Stage 3 moves 3M.

    There weights are gathered for the forward and again for the backward. With room for two blocks
    the last two of the forward are still there, and no gradient passes through the first.
    """
    block, blocks, updates = 2 * 3 * 4096, 6, 3
    whole = blocks * block
    recipes = [Recipe(stage=stage, blocks=blocks) for stage in (1, 2)]
    recipes.append(Recipe(stage=3, blocks=blocks, pool_bytes=2048))
    one, two, three = (result["bytes"] for result in ranks.run(3, training.train_all, recipes)[0])
    assert one == two == {"gradients": updates * whole, "weights": updates * whole}
    assert three["gradients"] == updates * whole
    # The first backward does not know yet that the first block is not needed; at the end the
    # weights are asked for once more.
    assert three["weights"] == updates * (2 * whole - 3 * block) + block + whole


def test_bytes_between_ranks_are_those_of_the_program():
    """Per update, in every stage, also with room for all weights and with weights on the host."""
    base = Recipe(blocks=6, differentiates_inputs=True)
    recipes = [replace(base, stage=stage) for stage in (1, 2, 3)]
    few = replace(base, stage=3, pool_bytes=2048)
    recipes += [few, replace(few, weights=WeightPlace.HOST), replace(few, micro=2)]
    longer = [replace(recipe, steps=recipe.steps + 1) for recipe in recipes]
    found = ranks.run(3, training.train_all, [*recipes, *longer])[0]
    for one, two in zip(found[: len(recipes)], found[len(recipes) :], strict=True):
        moved = sum(two["bytes"].values()) - sum(one["bytes"].values())
        assert moved == two["planned"]["ranks"]
        assert two["traffic"].get("up", 0) - one["traffic"].get("up", 0) == two["planned"]["up"]


def test_memory_of_a_rank_follows_the_formulas():
    """Stage 1 to 3 in bf16: 2P + 14P/N, 2P + 14P/N and 16P/N bytes, of which sums are 4P/N.

    Masters are split, so they take 2 bytes beside a weight; sums over ranks are fp32 and come and
    go. A sum is not in the ledger between steps. Beside all that is room for exchanges: two units'
    gradients packed and one's that arrive, and in stage 3 a gather.
    """
    block, blocks = 3 * 4096, 4
    padded = blocks * block
    recipes = [Recipe(stage=s, place=UpdatePlace.DEVICE, blocks=blocks) for s in (0, 1, 2, 3)]
    results = ranks.run(3, training.train_all, recipes)[0]
    state, weights = 10 * padded, 2 * padded
    pool = blocks * 1024  # gathered weights of stage 3, without padding
    for result, expected in zip(
        results,
        (
            weights + state,
            weights + state // 3,
            weights + state // 3,
            (weights + state) // 3 + pool,
        ),
        strict=True,
    ):
        room = result["ledger"].pop("device staging")
        assert room == 3 * 2 * padded // blocks + (result is results[3]) * 2 * 4 * 4096
        # each allocation is rounded up to pages where the device is the host
        assert expected <= sum(result["ledger"].values()) <= expected + 4096 * 4 * blocks


def test_slow_exchanges_hide_behind_backward_and_forward():
    """With computing and exchanging equally slow a step takes the longer, not the sum."""
    alone = Recipe(stage=2, blocks=5, think_seconds=0.04)
    recipes = [alone, replace(alone, slow_seconds=0.04)]
    for before, slowed in ranks.run(3, training.train_all, recipes):
        assert slowed["slept"] == pytest.approx(2 * 5 * 3 * 0.04)
        # in series it would be all of it; a unit's exchange is not hidden at either end of a step
        assert slowed["seconds"] - before["seconds"] < 0.6 * slowed["slept"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("micro", [1, 2])
def test_matrix(size, dtype, micro):
    base = Recipe(dtype=dtype, micro=micro, steps=4)
    recipes = variants(base)
    recipes += [replace(base, stage=s, place=UpdatePlace.STREAMED) for s in (0, 1, 2, 3)]
    recipes += [
        replace(base, stage=3, weights=WeightPlace.HOST, place=place, pool_bytes=40 << 10)
        for place in (UpdatePlace.HOST, UpdatePlace.STREAMED)
    ]
    by_rank = ranks.run(size, training.train_all, recipes, seconds=250)
    results = [result for results in by_rank for result in results]
    stages = [recipe.stage for recipe in recipes] * size
    if micro == 1:
        _assert_same(results)
    else:
        _assert_same([r for r, stage in zip(results, stages, strict=True) if stage < 2])
        _assert_same([r for r, stage in zip(results, stages, strict=True) if stage >= 2])


def test_shards_begin_at_blocks():
    assert SHARDED_ALIGNMENT_ELEMENTS == BLOCK
