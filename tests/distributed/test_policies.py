"""Speculative and delayed updates over several ranks: the bits of every stage."""

from __future__ import annotations

from dataclasses import replace

from distributed import ranks, training
from distributed.training import Recipe
from forebay.plan import UpdatePlace
from forebay.plan.policies import Delayed, Speculative

_STAGES = [Recipe(stage=stage, steps=5, unit_elements=1) for stage in (0, 1, 2, 3)]


def _assert_same(results):
    for other in results[1:]:
        for key in ("norms", "weights", "steps"):
            assert other[key] == results[0][key], key


def test_speculative_updates_are_the_exact_ones():
    """Clipped in some steps and not in others; taken where they were not."""
    always = Speculative(most_discarded=1.0)
    recipes = [_STAGES[1], *(replace(recipe, policy=always) for recipe in _STAGES)]
    for results in ranks.run(3, training.train_all, recipes):
        _assert_same(results)
        assert results[0]["taken"] == 0
        assert all(result["taken"] > 0 for result in results[1:])


def test_delayed_updates_are_the_same_at_every_stage():
    delayed = Delayed(warm_up_steps=1)
    recipes = [_STAGES[1], *(replace(recipe, policy=delayed) for recipe in _STAGES)]
    recipes += [replace(recipe, place=UpdatePlace.DEVICE) for recipe in recipes[1:]]
    recipes += [replace(recipe, place=UpdatePlace.NVME) for recipe in recipes[3:5]]
    for exact, *results in ranks.run(3, training.train_all, recipes):
        _assert_same(results)
        assert results[0]["norms"][:2] == exact["norms"][:2]
        assert results[0]["norms"][2] != exact["norms"][2]  # one update behind from there on
