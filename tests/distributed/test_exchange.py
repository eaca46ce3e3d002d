"""Other ways of adding gradients up: by the library, in 16 bits, within groups of ranks first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distributed import copies, ranks, training
from distributed.definition import by_definition
from distributed.training import Recipe
from forebay.comm.exchange import Exchange, Reduction
from forebay.plan import UpdatePlace, WeightPlace

_LIBRARY = Exchange(reduction=Reduction.LIBRARY)
_HALF = Exchange(dtype=torch.bfloat16)


def _key(result):
    return result["norms"], result["weights"], result["steps"]


def test_the_library_adds_and_16_bits_round():
    """Each is near the sum of the definition; tiers and stages agree with one another."""
    ranked = Recipe(dtype=torch.float32)
    recipes = [ranked]
    for exchange in (_LIBRARY, _HALF, replace(_LIBRARY, dtype=torch.bfloat16)):
        base = replace(ranked, exchange=exchange)
        recipes += [
            replace(base, stage=1, place=UpdatePlace.DEVICE),
            replace(base, stage=2),
            replace(base, stage=3, weights=WeightPlace.HOST),
        ]
    by_rank = ranks.run(3, training.train_all, recipes)
    for results in zip(*by_rank, strict=True):
        assert len({str(_key(result)) for result in results}) == 1  # ranks hold the same weights
    first, *others = by_rank[0]
    whole = first["bytes"]["gradients"]
    for start, error, share in ((0, 1e-6, 1), (3, 1e-2, 2), (6, 2e-2, 2)):
        group = others[start : start + 3]
        assert _key(group[0]) == _key(group[1]) == _key(group[2])
        assert group[0]["norms"] == pytest.approx(first["norms"], rel=error)
        assert group[0]["bytes"]["gradients"] * share == whole
    assert others[3]["norms"] != first["norms"]  # else nothing was rounded


def test_gradients_that_travel_wider_have_the_same_bits():
    base = Recipe(stage=2)
    wide = replace(base, exchange=Exchange(dtype=torch.float32))
    narrow, wider = ranks.run(3, training.train_all, [base, wide])[0]
    assert _key(narrow) == _key(wider)
    assert wider["bytes"]["gradients"] == 2 * narrow["bytes"]["gradients"]


def test_sums_of_several_backwards_travel_in_16_bits():
    base = Recipe(micro=2, dtype=torch.bfloat16)
    recipes = [replace(base, stage=s, exchange=e) for s in (1, 2) for e in (Exchange(), _HALF)]
    exact, rounded, every, same = ranks.run(3, training.train_all, recipes)[0]
    assert rounded["norms"] == pytest.approx(exact["norms"], rel=1e-2)
    assert rounded["norms"] != exact["norms"]
    assert 2 * rounded["bytes"]["gradients"] == exact["bytes"]["gradients"]
    assert _key(every) == _key(same)  # stage 2 sends each bf16 addend as it is


def test_each_pair_of_four_ranks_holds_a_copy():
    """Hybrid sharding: half of the state on each rank, and the bits of sums over all ranks."""
    base = Recipe(sharers=2)
    recipes = [
        replace(base, stage=stage, place=place)
        for stage in (0, 1, 2, 3)
        for place in (UpdatePlace.HOST, UpdatePlace.DEVICE)
    ]
    recipes.append(replace(base, stage=3, weights=WeightPlace.HOST))
    recipes.append(Recipe(stage=2, place=UpdatePlace.DEVICE))
    by_rank = ranks.run(4, training.train_all, recipes, seconds=150)
    *hybrid, over_all = by_rank[0]
    for results in by_rank:
        for result in results:
            assert _key(result) == _key(over_all)
    assert _key(over_all)[:2] == by_definition(base, size=4)
    # a half and not a quarter, each allocation rounded up to pages
    mine, least = (r["ledger"]["device optim_states"] for r in (hybrid[5], over_all))
    assert mine >= 1.2 * least
    assert hybrid[5]["bytes"]["copies"] == 2 * hybrid[5]["bytes"]["gradients"]  # fp32, two halves


def test_copies_of_several_backwards_and_of_the_librarys_sums():
    """Where each backward is summed too; the library's sums are near, and alike on all ranks."""
    several = Recipe(micro=2, dtype=torch.float32, stage=3, place=UpdatePlace.DEVICE)
    recipes = [several, replace(several, sharers=2)]
    recipes.append(replace(several, sharers=2, exchange=_LIBRARY))
    by_rank = ranks.run(4, training.train_all, recipes)
    plain, hybrid, library = by_rank[0]
    assert _key(plain) == _key(hybrid)
    assert library["norms"] == pytest.approx(plain["norms"], rel=1e-6)
    assert len({result[2]["weights"] for result in by_rank}) == 1


@pytest.mark.parametrize("how", ["mics", "mesh", "mesh in another order"])
def test_copies_by_configuration_or_mesh(how, tmp_path):
    results = ranks.run(4, copies.copies, how, str(tmp_path))
    assert [r["sharers"] for r in results] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert len({r["weights"] for r in results}) == 1


@pytest.mark.slow
def test_a_mesh_of_copies_has_the_bits_of_one_copy_at_every_stage():
    for found in ranks.run(4, copies.meshes):
        assert [len(trained) for trained in found] == [1] * 8
        assert len(set.union(*found)) == 1  # one backward per update: all stages alike


def test_groups_that_do_not_come_out():
    for kind, message in ranks.collect(ranks.start(3, copies.copies, "mics", "unused")):
        assert kind == "ConfigError", message
        assert "mics_shard_size is 2, and there are 3 ranks" in message


def test_a_mesh_that_cannot_be_put_in_order_or_differs_is_told():
    for kind, message in ranks.collect(ranks.start(4, copies.copies, "crossed mesh", "unused")):
        assert kind == "ConfigError", message
        assert "ranks 0, 3 share one copy of the state, and ranks 1, 2 another" in message
    for kind, message in ranks.collect(ranks.start(4, copies.copies, "other meshes", "unused")):
        assert kind == "ConfigError", message
        assert "how ranks share copies of the state is [[0, 1, 2, 3]] on rank 1" in message
