"""kill -9 at random moments while checkpoints are written: nothing is ever lost."""

from __future__ import annotations

import contextlib
import random
import signal
import time

import pytest
import torch

from checkpoint_cases import Layout, assert_same, engine_of, numbers, run
from checkpoint_worker import start
from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.folder import CheckpointFolder
from forebay.checkpoint.reader import Checkpoint

_MODES = ("at once", "beside", "same")
_STEPS = 15


@pytest.fixture(scope="module")
def uninterrupted():
    with engine_of(Layout(hidden=150)) as engine:
        run(engine, 0, _STEPS)
        return numbers(engine)


def _round(folder, mode, chance):
    """Start, and kill at a random moment of one of the first saves.

    Returns whether the kill left a save half done, or None where the run had ended before it.
    """
    worker, says = start(folder, _STEPS, mode)
    saves, began, took = chance.randrange(1, 4), 0.0, 0.02
    with says, contextlib.suppress(EOFError):  # the run has ended
        while saves:
            if says.recv() == "saving":
                began = time.monotonic()
                saves -= 1
            else:
                took = time.monotonic() - began
        # beside training most of a save comes after its call
        time.sleep(chance.random() * (0.03 if mode == "beside" else took))
        worker.kill()
    worker.join(60)
    if worker.exitcode != -signal.SIGKILL:
        assert worker.exitcode == 0
        return None
    return any(item.name.startswith(".") for item in folder.iterdir())


def _check_newest(folder):
    """The step of the newest complete checkpoint, which is whole to the last byte; 0: none."""
    complete = CheckpointFolder(folder, disk=RealDisk()).complete()
    if not complete:
        return 0
    with Checkpoint(complete[0]) as checkpoint:
        checkpoint.verify()
        return checkpoint.manifest.counters["global_steps"]


def _killed_again_and_again(folder, want, mode, rounds):
    """One run, killed up to so many times, then left to its end.

    Returns how often it was killed, and how often in the middle of a save.
    """
    folder.mkdir()
    chance = random.Random(str(folder))
    kills = inside = step = 0
    while kills < rounds:
        half_done = _round(folder, mode, chance)
        if half_done is None:
            break
        kills, inside = kills + 1, inside + half_done
        newest = _check_newest(folder)
        assert newest >= step
        step = newest
    worker, says = start(folder, _STEPS, mode)
    with says:
        worker.join(240)
    assert worker.exitcode == 0
    assert_same(torch.load(folder / "numbers.pt"), want)
    return kills, inside


@pytest.mark.parametrize(("mode", "rounds"), [("at once", 2), ("beside", 2), ("same", 1)])
def test_killed_while_saving(tmp_path, uninterrupted, mode, rounds):
    kills, _ = _killed_again_and_again(tmp_path / "run", uninterrupted, mode, rounds)
    assert kills == rounds


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_fifty_times(tmp_path, uninterrupted):
    """50 kills in three modes; a run that reaches its end is followed by another."""
    inside = 0
    for mode, rounds in zip(_MODES, (17, 17, 16), strict=True):
        done = runs = 0
        while done < rounds:
            folder = tmp_path / f"{mode} {runs}"
            kills, half_done = _killed_again_and_again(
                folder, uninterrupted, mode, min(5, rounds - done)
            )
            done, inside, runs = done + kills, inside + half_done, runs + 1
            assert runs < 50
        assert done == rounds
    assert inside >= 15, f"only {inside} of 50 kills met a save half done"
    print(f"50 kills, {inside} of them with a save half done")  # noqa: T201
