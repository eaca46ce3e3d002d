"""ZenFlow over ranks: each chooses columns of its slices; stages 1 to 3 agree, with the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distributed import ranks, training
from distributed.training import Recipe, loss_of, model_of, optimizer_of, windows
from forebay.optim.rule import AdamRule
from forebay.plan.zenflow import ZenFlow
from numerics.zenflow_oracle import Oracle

PLAIN = ZenFlow(topk_ratio=0.2, update_every=3, select_every=4, warm_up_steps=1)
MODES = {
    "plain": PLAIN,
    "overlap": replace(PLAIN, overlaps=True),
    "auto": replace(PLAIN, update_every=None, auto_ratio=0.6, select_every=6, overlaps=True),
    "on_host": replace(PLAIN, overlaps=True, keeps_state_on_host=True),
}


def _oracle(recipe, slices):
    """The oracle's norms, and a digest of its weights."""
    model = model_of(recipe.dtype)
    params, source = list(model.parameters()), optimizer_of(model)
    oracle = Oracle(recipe.policy, clip=recipe.clip, source=source, rule=AdamRule.of(source))
    by_param = {id(p.param): p for p in oracle.params}
    oracle.params_in_order = [by_param[id(param)] for param in params]
    for param, of_ranks in zip(oracle.params_in_order, zip(*slices, strict=True), strict=True):
        param.slices = [one for one in of_ranks if one[1]]
    inputs = [windows(recipe, rank=rank) for rank in range(len(slices))]
    norms = []
    for step in range(recipe.steps):
        sums = [None] * len(params)
        for of_rank in inputs:
            model.zero_grad()
            loss_of(model, of_rank[step][0], recipe).backward()
            for n, param in enumerate(params):
                if param.grad is not None:
                    mine = param.grad.float().reshape(-1)
                    sums[n] = mine.clone() if sums[n] is None else sums[n] + mine
        norm, _ = oracle.step(sums, loss_scale=len(slices))
        norms.append(norm)
    oracle.finish()
    return norms, training.digest(list(model.state_dict().values()))


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("plain", marks=pytest.mark.slow),
        "overlap",
        "auto",
        pytest.param("on_host", marks=pytest.mark.slow),
    ],
)
def test_three_ranks_at_every_stage(mode):
    base = Recipe(policy=MODES[mode], steps=11)
    recipes = [replace(base, stage=stage) for stage in (1, 2, 3)]
    by_rank = ranks.run(3, training.train_all, recipes)
    slices = [results[0]["slices"] for results in by_rank]
    assert sum(len({of for of in one if of[1]}) > 1 for one in zip(*slices, strict=True))
    norms, weights = _oracle(base, slices)
    assert min(norms) < base.clip < max(norms)
    for results in by_rank:
        for result in results:
            assert result["slices"] in slices
            assert (result["norms"], result["weights"]) == (norms, weights)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["overlap"])
def test_several_backwards_on_three_ranks(mode):
    base = Recipe(policy=MODES[mode], steps=8, micro=2, dtype=torch.float32)
    recipes = [replace(base, stage=stage) for stage in (1, 2, 3)]
    by_rank = ranks.run(3, training.train_all, [*recipes, replace(recipes[0], policy=PLAIN)])
    one, two, three, plain = by_rank[0]
    assert two["weights"] == three["weights"]  # stage 1 adds over ranks once, after both
    assert one["weights"] != plain["weights"]
    assert len({results[i]["weights"] for results in by_rank for i in (1, 2)}) == 1
