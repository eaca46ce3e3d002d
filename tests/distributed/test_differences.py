"""Ranks that part after the start: what differs is named on all of them."""

from __future__ import annotations

from distributed import differences, ranks


def test_a_rank_that_asks_for_another_weight_is_named():
    first, other = ranks.run(2, differences.asks_for_others, 1)
    ask = "this rank (0) asks for {} of {}0.weight, and rank 1 for something else"
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
