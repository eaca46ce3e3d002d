"""Ranks of one machine share its memory: each plans with its part, and all of them before any."""

from __future__ import annotations

from distributed import ranks, scripts


def test_a_host_budget_is_the_machines():
    """Stage 0: every rank wants all of the state, and three of them do not fit where one does."""
    results = ranks.run(3, scripts.host_share, "6MB")
    assert {result["budget"] for result in results} == {2_000_000}
    for kind, message in ranks.collect(ranks.start(3, scripts.host_share, "90KB")):
        assert kind in {"BudgetError", "RankError"}, message
        assert "shared by 3 ranks of this machine" in message
        assert "forebay.host_budget" in message
