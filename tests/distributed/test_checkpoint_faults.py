"""Saves of ranks that go wrong on one of them: the old checkpoint stays, and all hear why."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from distributed import broken_saves, ranks, saved_runs
from distributed.saved_runs import Run
from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.folder import CheckpointFolder


def _complete(folder: Path) -> set[str]:
    return {item.name for item in CheckpointFolder(folder, disk=RealDisk()).complete()}


@pytest.mark.parametrize(
    ("run", "victim"),
    [
        pytest.param(Run(stage=3), 1, marks=pytest.mark.slow),
        (Run(stage=2, beside=True), 1),
        pytest.param(Run(stage=1, offload="none"), 0, marks=pytest.mark.slow),
        pytest.param(Run(stage=0, beside=True), 2, marks=pytest.mark.slow),
        pytest.param(Run(stage=3, offload="nvme", beside=True), 0, marks=pytest.mark.slow),
    ],
)
def test_one_full_disk_leaves_the_old_checkpoint_and_training_goes_on(tmp_path, run, victim):
    results = ranks.run(3, broken_saves.full_disk, str(tmp_path), run, victim)
    for rank, result in enumerate(results):
        head = "" if rank == victim else f"rank {victim} of 3: "
        assert result["said"].startswith(f"{head}cannot save checkpoint bad in {tmp_path}")
        assert "No space left on device" in result["said"]
    assert _complete(tmp_path) == {"good", "after"}
    assert {item.name for item in tmp_path.iterdir()} == {"good", "after", "latest"}
    assert results[0]["end"] == ranks.run(3, broken_saves.plain, run, 5)[0]


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_killed_in_a_save_is_named_and_the_old_checkpoint_stays(tmp_path, victim):
    started = ranks.start(3, broken_saves.killed, str(tmp_path), Run(stage=3), victim)
    results = ranks.collect(started)
    killed_at = (tmp_path / "killed").stat().st_mtime
    for rank, (kind, message) in enumerate(results):
        assert kind == ("dead" if rank == victim else "RankError"), message
        if rank != victim:
            assert f"rank {victim}" in message
            assert (tmp_path / f"heard-{rank}").stat().st_mtime - killed_at < 30
    assert _complete(tmp_path) == {"good"}
    loaded = ranks.run(3, saved_runs.load_latest, str(tmp_path), Run(stage=2))
    assert loaded == [1, 1, 1]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("tag", "rank 1 saves a checkpoint with ['mine', "),
        ("folder", "is not the folder that rank 0 writes to"),
        pytest.param("value", "client_state['value'] is a builtins", marks=pytest.mark.slow),
        ("loaded", "no checkpoint nothing in "),
        ("frozen", "rank 1 saves a checkpoint with ['ours', "),
        ("scope", "rank 1 loads "),
    ],
)
def test_ranks_that_save_or_load_something_else(tmp_path, what, says):
    for rank, said in enumerate(ranks.run(2, broken_saves.disagree, str(tmp_path), what)):
        assert len(said) == 1
        assert says in said[0], said
        assert (
            what in {"tag", "frozen", "scope"} or rank == 1 or said[0].startswith("rank 1 of 2: ")
        )


@pytest.mark.parametrize(
    "how",
    [
        "checkpoint",
        pytest.param("weights", marks=pytest.mark.slow),
        pytest.param("states", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_does_not_save_is_named_and_nobody_waits_for_ever(tmp_path, how):
    what = {
        "checkpoint": "saving checkpoint alone",
        "weights": "saving " + str(tmp_path / "model.safetensors"),
        "states": "offload_states()",
    }[how]
    results = ranks.collect(ranks.start(3, broken_saves.saves_alone, str(tmp_path), how))
    assert [kind for kind, _ in results] == ["RankError"] * 3, results
    for rank in (0, 2):
        assert (
            f"not every rank has come to {what}, where rank {rank} waited: rank 1 was in"
            in (results[rank][1])
        )
        assert "hint: every rank calls it at the same point" in results[rank][1]
    assert f"rank 1 (this one) has come too late to {what}" in results[1][1]
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_named_on_every_rank_before_anything_changes(tmp_path):
    ranks.run(3, saved_runs.save, str(tmp_path), [Run()], 1, 1)
    file = tmp_path / str(Run()) / "rank00001-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    found = ranks.run(2, broken_saves.load_damaged, str(tmp_path), Run(stage=3))
    for said, is_unchanged in found:
        assert f"{file} is damaged" in said
        assert is_unchanged
    assert sum(said.startswith("rank ") for said, _ in found) == 1  # one rank reads those bytes


@pytest.mark.parametrize("beside", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_newest_few_are_kept_and_nothing_else_is_left(tmp_path, beside):
    run = Run(stage=1, keep=2, beside=beside)
    ranks.run(2, broken_saves.save_every_step, str(tmp_path), run, 4)
    left = {item.name for item in tmp_path.iterdir() if not item.name.startswith("saving-")}
    assert left == {"global_step3", "global_step4", "latest"}
    names = {item.name for item in (tmp_path / "global_step4").iterdir()}
    assert names == {"manifest.json", *(f"rank0000{rank}-00000.safetensors" for rank in range(2))}


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "run",
    [
        Run(stage=3),
        Run(stage=2, beside=True),
        Run(stage=1, units=1, offload="none"),  # the same tag again and again
    ],
)
def test_killed_at_random_moments_20_times(tmp_path, run):
    """Whatever is left, the newest complete checkpoint loads, and the end is that of no kill."""
    last, rounds, in_a_save = 400, 20, 0
    chance = random.Random(str(run))
    for _ in range(rounds):
        started = ranks.start(2, broken_saves.save_every_step, str(tmp_path), run, last)
        _await_progress(tmp_path)
        time.sleep(chance.uniform(0.0, 0.3))
        victim = chance.randrange(2)
        in_a_save += (tmp_path / f"saving-{victim}").exists()
        assert started[victim][0].is_alive()
        started[victim][0].kill()
        time.sleep(chance.uniform(0.0, 0.3))  # the other one may end its part of a save
        started[1 - victim][0].kill()  # unless it has noticed already
        for process, pipe in started:
            process.join(10)
            pipe.close()
    steps = ranks.run(2, saved_runs.load_latest, str(tmp_path), run)
    assert steps[0] == steps[1] >= rounds
    end = steps[0] + 2
    went_on = ranks.run(2, broken_saves.save_every_step, str(tmp_path), run, end, seconds=200)
    assert went_on == ranks.run(2, broken_saves.plain, run, end, seconds=200)
    assert in_a_save >= rounds // 4, in_a_save


def _await_progress(folder: Path) -> None:
    """Until a checkpoint is complete that was not there before."""

    def newest() -> int:
        found = CheckpointFolder(folder, disk=RealDisk()).complete()
        return found[0].stat().st_mtime_ns if found else 0

    before, until = newest(), time.monotonic() + 60
    while newest() == before and time.monotonic() < until:
        time.sleep(0.02)
