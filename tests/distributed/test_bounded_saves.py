"""Saves beside training on several ranks, in less memory than the state: steps wait for disks."""

from __future__ import annotations

import pytest

from distributed import bounded_saves, ranks
from distributed.bounded_saves import Case
from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.folder import CheckpointFolder
from forebay.checkpoint.manifest import BLOCK_BYTES

slow = pytest.mark.slow
# Longer than ranks have to come to a pass.
_LATE = 5.0


@pytest.mark.parametrize(
    "case",
    [
        Case(stage=3, slow_seconds=(0.0, _LATE)),
        pytest.param(Case(stage=0, slow_seconds=(_LATE, 0.0)), marks=slow),
        pytest.param(Case(stage=1, offload="none", slow_seconds=(0.0, _LATE)), marks=slow),
        pytest.param(Case(stage=2, offload="nvme", slow_seconds=(0.0, _LATE)), marks=slow),
        pytest.param(Case(stage=3, offload="weights", slow_seconds=(_LATE, 1.0)), marks=slow),
        pytest.param(Case(update="speculative", slow_seconds=(0.0, _LATE)), marks=slow),
        pytest.param(Case(update="delayed", slow_seconds=(0.0, _LATE)), marks=slow),
        pytest.param(Case(update="zenflow", slow_seconds=(0.0, _LATE)), marks=slow),
    ],
)
def test_ranks_wait_for_the_slowest_disk_longer_than_for_each_other(tmp_path, case):
    results = ranks.run(2, bounded_saves.save, str(tmp_path), case)
    for found in results:
        assert found["staged"] == BLOCK_BYTES
        assert found["left"] == 0
        assert found["seconds"] > _LATE - 1
        assert found["stall"] > 1
        assert found.get("loaded") == found.get("at_save")
        assert found["again"] == found["end"]
    assert [found["end"] for found in results] == ranks.run(2, bounded_saves.plain, case)


@slow
def test_moments_set_by_hand_meanwhile_are_not_in_the_checkpoint(tmp_path):
    case = Case(slow_seconds=(1.0, 1.0), writes_by_hand=True)
    for found in ranks.run(2, bounded_saves.save, str(tmp_path), case):
        assert found["loaded"] == found["at_save"]


@slow
@pytest.mark.parametrize(
    ("victim", "others"),
    [
        (1, 0.0),  # rank 0 has copied everything
        (0, 0.0),
        (1, 60.0),  # rank 0 waits for its own disk
    ],
)
def test_a_rank_killed_while_others_wait_for_its_disk_is_named(tmp_path, victim, others):
    slow_seconds = (others, others)
    started = ranks.start(
        2, bounded_saves.killed, str(tmp_path), Case(stage=3, slow_seconds=slow_seconds), victim
    )
    kind, message = ranks.collect(started, seconds=120)[1 - victim]
    assert kind == "RankError", message
    assert f"rank {victim}" in message
    killed_at = (tmp_path / "killed").stat().st_mtime
    assert (tmp_path / f"heard-{1 - victim}").stat().st_mtime - killed_at < 30
    assert CheckpointFolder(tmp_path, disk=RealDisk()).complete() == []


@slow
def test_ranks_meet_once_for_two_saves_without_a_step_between(tmp_path):
    ranks.run(2, bounded_saves.save_twice, str(tmp_path), Case())
