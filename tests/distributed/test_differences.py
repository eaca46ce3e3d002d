"""Ranks that part after the start: what differs is named on all of them."""

from __future__ import annotations

import pytest

from distributed import differences, ranks


def test_a_rank_that_asks_for_another_weight_is_named():
    first, other = ranks.run(2, differences.asks_for_others, 1)
    ask = "this rank (0) asks for {0} of {1}0.weight, and rank 1 for {0} of {1}1.weight"
    told = {
        "master": ask.format("the fp32 value", ""),
        "moment": ask.format("exp_avg", ""),
        "gradient": ask.format("the gradient", ""),
        "slice": ask.format("a new value", ""),
        "window": ask.format("rank 0's value", "the parameter "),
    }
    assert first == [f"{name}: {message}" for name, message in told.items()]
    assert len(other) == len(told)
    assert all("this rank (1)" in line and "1.weight" in line for line in other)


@pytest.mark.parametrize(("stage", "name"), [(0, "lr"), (3, "weight_decay")])
def test_an_option_that_one_rank_alone_changed_is_named_at_the_step(stage, name):
    said = ranks.run(2, differences.steps_with_other_options, stage, name)
    before = {"lr": 0.01, "weight_decay": 0.1}[name]
    told = f"{name} of parameter group 0 is 0.5 on rank 1 and {before} on rank 0 at a step"
    assert said == [told, told]


@pytest.mark.parametrize("piece", [1, 4])
def test_a_rank_whose_state_or_weights_do_not_come_home_is_named(piece):
    """And it is told itself once: closing raises nothing more."""
    first, other = ranks.run(2, differences.link_fails, piece)
    assert first.startswith("TransferError: ")
    assert "it is cut" in first
    assert other.startswith("RankError: rank 0 of 2 failed: ")
    assert "it is cut" in other
