"""Weights that the user loads on several ranks with his own code."""

from __future__ import annotations

import pytest

from distributed import ranks, user_loads
from distributed.saved_runs import Run

slow = pytest.mark.slow


@pytest.mark.parametrize("inside", [pytest.param("window", marks=slow), "module"])
@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (3, "weights"),
        pytest.param(2, "cpu", marks=slow),
        pytest.param(3, "none", marks=slow),
        pytest.param(3, "files", marks=slow),
    ],
)
def test_a_parent_and_its_children_that_share_a_unit_are_loaded(stage, offload, inside):
    for checks in ranks.run(2, user_loads.load_state_dict, stage, offload, inside):
        assert all(checks.values()), checks


@slow
@pytest.mark.parametrize(("modifier", "sharers"), [(1, -1), (1, 2), (2, 2)])
def test_what_one_rank_writes_reaches_every_copy(modifier, sharers):
    for found in ranks.run(4, user_loads.load_on_one_rank, modifier, sharers):
        assert all(found.values()), found


@pytest.mark.parametrize(
    ("run", "by"),
    [
        (Run(stage=3, offload="weights"), "parameter"),
        *(
            pytest.param(Run(stage=stage, offload=offload), by, marks=slow)
            for stage, offload in ((0, "cpu"), (1, "none"), (2, "nvme"), (3, "none"), (3, "files"))
            for by in ("parameter", "state dict")
        ),
        pytest.param(Run(stage=3, offload="weights"), "state dict", marks=slow),
        pytest.param(Run(stage=2, precision="fp16"), "parameter", marks=slow),
        pytest.param(Run(stage=3, precision=""), "parameter", marks=slow),
    ],
)
def test_every_rank_calls_the_users_own_loading_function(tmp_path, run, by):
    for checks in ranks.run(3, user_loads.load_with, str(tmp_path), run, by):
        assert all(checks.values()), checks


@pytest.mark.parametrize("by", ["load", "window"])
def test_what_brings_nothing_new_changes_no_bit_on_any_rank(by):
    """Whether weights are older than their masters, or in slices."""
    runs = [
        Run(stage=2, update="delayed"),
        Run(stage=3, update="zenflow"),
        Run(stage=3, offload="weights"),
    ]
    for same in ranks.run(2, user_loads.change_nothing, runs, by):
        assert same == [True] * len(runs)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=slow), 3])
def test_a_write_through_data_in_a_window_is_news_to_other_ranks(stage):
    for found in ranks.run(2, user_loads.write_past_autograd, stage):
        assert found == [True, True]
