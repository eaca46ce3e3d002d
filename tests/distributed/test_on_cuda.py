"""Ranks on NVIDIA devices: several processes on one over gloo, one process for each over NCCL."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distributed import ranks, training
from distributed.training import Recipe, variants
from forebay.plan import UpdatePlace, WeightPlace

pytestmark = pytest.mark.cuda


def _recipes(base: Recipe) -> list[Recipe]:
    recipes = [v for v in variants(base) if v.place is not UpdatePlace.NVME]
    recipes += [replace(base, stage=s, place=UpdatePlace.STREAMED) for s in (0, 1, 2, 3)]
    streamed = replace(base, stage=3, weights=WeightPlace.HOST, pool_bytes=1 << 20)
    return [*recipes, streamed, replace(streamed, place=UpdatePlace.STREAMED)]


def _assert_same(by_rank):
    results = [result for results in by_rank for result in results]
    for other in results[1:]:
        for key in ("norms", "weights", "steps"):
            assert other[key] == results[0][key], key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_three_processes_share_a_device_over_gloo(dtype):
    recipes = _recipes(Recipe(dtype=dtype, device="cuda"))
    _assert_same(ranks.run(3, training.train_all, recipes, seconds=250))


def test_a_device_for_each_rank_over_nccl():
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two GPUs, there is {count}")
    recipes = _recipes(Recipe(device="cuda", backend="nccl"))
    by_rank = ranks.run(min(count, 4), training.train_all, recipes, seconds=250)
    _assert_same(by_rank)
    over_gloo = replace(recipes[0], backend="gloo")
    assert (
        ranks.run(min(count, 4), training.train, over_gloo)[0]["weights"]
        == by_rank[0][0]["weights"]
    )


def test_one_process_over_nccl_trains_as_one_without_a_group():
    (alone,) = ranks.run(1, training.train_all, [Recipe(device="cuda", stage=0)])
    recipes = [Recipe(device="cuda", backend="nccl", stage=stage) for stage in (1, 3)]
    (over_nccl,) = ranks.run(1, training.train_all, recipes)
    _assert_same([alone + over_nccl])
