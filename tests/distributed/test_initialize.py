"""`forebay.initialize` on several ranks: what works, and what is said when it cannot."""

from __future__ import annotations

import time

import pytest
from torch.distributed import TCPStore

from distributed import ranks, scripts


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_three_ranks_share_the_data(stage):
    results = ranks.run(3, scripts.fit, stage, 2)
    assert [r["rank"] for r in results] == [(0, 3), (1, 3), (2, 3)]
    assert {r["batch"] for r in results} == {4 * 2 * 3}
    # 23 samples: eight for each rank, one of them twice; two micro-batches an epoch
    assert {r["batches"] for r in results} == {4}
    assert {r["steps"] for r in results} == {2}
    assert len({r["weights"] for r in results}) == 1
    assert results[0]["norms"] == results[1]["norms"] == results[2]["norms"]
    assert results[0]["seen"] != results[1]["seen"]


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_use_different_modules_do_not_wait_for_each_other(stage):
    results = ranks.run(3, scripts.uneven_use, stage)
    assert len({r["weights"] for r in results}) == 1
    # weight and bias of: the common module, the experts of ranks 0 to 2, and one that nobody used
    assert results[0]["steps"] == [3, 3, 3, 3, 3, 3, 2, 2, 0, 0]
    assert results[0]["moved"] == [True] * 8 + [False] * 2
    # in stage 3 each rank's own expert is gathered by all of them, and that is counted and said
    assert len({r["uneven"] for r in results}) == 1
    assert (results[0]["uneven"] > 0) == (stage == 3)
    assert ("some ranks needed the weights of unit" in results[0]["said"]) == (stage == 3)


@pytest.mark.parametrize("offload", [False, True])
def test_stage_3_in_other_orders_has_the_bits_of_stage_1(offload):
    """Layers in an order drawn by each rank, some skipped, generation on one rank in between."""
    plain, *others = (
        ranks.run(3, scripts.other_orders, stage, offload and stage == 3) for stage in (1, 3)
    )
    for results in others:
        assert [r["weights"] for r in results] == [r["weights"] for r in plain]
        assert results[0]["uneven"] > 3
        assert results[0]["shown"] > 0
        assert all(r["refused"] for r in results)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("config", "config key train_batch_size is 24 on rank 1 and 12 on rank 0"),
        ("model", "parameter 0.weight is [6, 3] torch.float32 trained on rank 1 and [5, 3]"),
        ("weights", "the checksum of parameter 0.weight is "),
        ("seed", "torch's seed is 2 on rank 1 and 1 on rank 0"),
        ("key", "gradient_cliping"),
    ],
)
def test_what_differs_at_the_start_is_named(what, says):
    results = ranks.collect(ranks.start(3, scripts.differ, what))
    for kind, message in results:
        assert kind in {"ConfigError", "RankError"}, message
        # with the same seed, weights of another shape or value are named before anything else
        assert says in message or (what == "seed" and "checksum" in message), message
        assert "rank 1" in message or "gradient_cliping" in message


def test_a_batch_that_does_not_divide_by_the_ranks():
    for kind, message in ranks.collect(ranks.start(3, scripts.wrong_batch)):
        assert kind == "ConfigError"
        assert "3 processes" in message


@pytest.mark.parametrize("extra", [1, -1])
def test_more_passes_on_one_rank_are_an_error_that_names_it(extra):
    began = time.monotonic()
    results = ranks.collect(ranks.start(3, scripts.passes, extra), seconds=45)
    assert time.monotonic() - began < 30
    waiting = [1] if extra > 0 else [0, 2]
    for rank in waiting:
        kind, message = results[rank]
        assert kind == "RankError", message
        assert "rank" in message
        assert "backward" in message
    if extra < 0:
        assert "rank 1 of 3" in results[0][1]


def test_other_passes_are_an_error_that_names_both():
    for kind, message in ranks.collect(ranks.start(3, scripts.evaluates_instead)):
        assert kind == "RankError", message
        assert "rank 1" in message or "rank 0" in message
        assert "last backward" in message


def test_a_killed_rank_is_named_within_30_seconds():
    began = time.monotonic()
    results = ranks.collect(ranks.start(3, scripts.is_killed), seconds=45)
    assert time.monotonic() - began < 30
    assert results[1][0] == "dead"
    for rank in (0, 2):
        kind, message = results[rank]
        assert kind == "RankError", message
        assert "rank 1 of 3 is gone" in message


def test_a_late_rank_is_told_that_it_was_late():
    results = ranks.collect(ranks.start(3, scripts.comes_late), seconds=40)
    assert [kind for kind, _ in results] == ["RankError"] * 3, results
    for rank in (0, 1):
        assert "rank 2 was in" in results[rank][1]
    assert "rank 2 (this one) has come too late to" in results[2][1]


@pytest.mark.slow
def test_a_rank_that_stays_away_is_named_within_30_seconds():
    started = ranks.start(3, scripts.stays_away)
    results = ranks.collect(started[:2], seconds=80)
    started[2][0].kill()
    for kind, found in results:
        assert kind == "ok", found
        said, seconds = found
        assert "rank 2" in said
        assert seconds < 30


def test_nothing_is_left_running_behind_a_closed_engine():
    assert ranks.run(3, scripts.closes_in_a_row) == [[0.0, 3.0, 6.0, 9.0]] * 3


def test_groups_after_a_destroyed_one_do_not_meet_in_its_remains():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    norms, *others = ranks.run(2, scripts.starts_again, store.port, seconds=40)
    assert len(set(norms)) == 1
    assert others == [norms]


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_values_of_sharded_state(stage, tmp_path):
    results = ranks.run(3, scripts.whole_values, stage, str(tmp_path))
    for result in results:
        assert all(result["checks"].values()), result["checks"]
    assert len({result["out"] for result in results}) == 1


@pytest.mark.parametrize("stage", [1, 3])
def test_a_scripts_own_collectives_do_not_meet_those_of_the_engine(stage):
    results = ranks.run(2, scripts.sums_of_its_own, stage, seconds=60)
    assert results == [[2.0 * step for step in range(12)]] * 2
