"""Limits of stage 3 on the weights that are gathered: the same bits, and bytes that follow."""

from __future__ import annotations

from dataclasses import replace

from distributed import ranks, training
from distributed.training import Recipe
from forebay.plan.load_rules import LoadRules

_BLOCK = 2 * 3 * 4096


def test_rules_change_what_is_gathered_and_no_bit():
    base = Recipe(stage=3, blocks=5)
    recipes = [
        base,
        replace(base, loads=LoadRules(ahead_bytes=0)),
        replace(base, loads=LoadRules(reuse_bytes=0)),
        replace(base, loads=LoadRules(persistent_elements=13 * 14)),
        replace(base, loads=LoadRules(persistent_elements=13 * 14, persistent_total=13 * 28)),
        replace(base, stage=2),
    ]
    free, late, once, resident, part, two = ranks.run(3, training.train_all, recipes)[0]
    for other in (late, once, resident, part):
        assert (other["norms"], other["weights"]) == (two["norms"], two["weights"])
    assert late["late"] > free["late"]
    # nothing that a forward has used is still there in the backward, but for its last unit
    assert once["bytes"]["weights"] >= free["bytes"]["weights"] + 3 * 3 * _BLOCK
    # every update brings all new weights at once, as in stage 2
    assert resident["bytes"] == two["bytes"]
    assert resident["bytes"]["weights"] < part["bytes"]["weights"] <= free["bytes"]["weights"]
