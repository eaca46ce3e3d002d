"""State and weights in files on several ranks: each has files of its own, and the bits are one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distributed import ranks, training
from distributed.training import Recipe
from forebay.plan import UpdatePlace, WeightPlace


def _recipes(base):
    """On the device, and in files: every stage, and stage 3 with weights there too."""
    state = replace(base, place=UpdatePlace.NVME)
    found = [replace(base, place=UpdatePlace.DEVICE)]
    found += [replace(state, stage=stage) for stage in (0, 1, 2, 3)]
    weights = replace(state, stage=3, weights=WeightPlace.NVME)
    late = replace(weights, pool_bytes=40 << 10, late_files_us=2000)
    found += [weights, replace(weights, unit_elements=1), late]
    return found


def _check(base, *, size):
    recipes = _recipes(base)
    by_rank = ranks.run(size, training.train_all, recipes, seconds=150)
    # law 1b: with more than one backward stages 0 and 1 sum once a window, 2 and 3 after each
    late = [recipe.stage >= 2 for recipe in recipes]
    for results in by_rank:
        groups = [results] if base.micro == 1 else [
            [r for r, is_late in zip(results, late, strict=True) if is_late is wanted]
            for wanted in (False, True)
        ]  # fmt: skip
        for group in groups:
            for other in group[1:]:
                for key in ("norms", "weights", "steps"):
                    assert other[key] == group[0][key], key
        weights = results[recipes.index(_recipes(base)[5])]
        assert weights["ledger"]["nvme lp_params"] > 0
        assert "host lp_params" not in weights["ledger"]
    assert by_rank[0][0]["weights"] == by_rank[1][0]["weights"]


def test_two_ranks():
    _check(Recipe(), size=2)


def test_slices_of_three_ranks_are_read_ahead_as_the_plan_counts_them():
    """What a gather reads while it is made is not counted: nobody knew of it before.

    On the first rank: state that is padding alone, as others have of units so small, stays where
    it is.
    """
    weights = Recipe(stage=3, blocks=4, place=UpdatePlace.NVME, weights=WeightPlace.NVME)
    recipes = [replace(weights, steps=steps) for steps in (3, 4)]
    three, four = ranks.run(3, training.train_all, recipes)[0]
    for lane in ("read", "write", "up", "down"):
        moved = four["traffic"][lane] - three["traffic"][lane]
        assert moved == four["planned"][lane], lane


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_in_every_precision(dtype, micro, size):
    _check(Recipe(dtype=dtype, micro=micro, steps=5), size=size)
