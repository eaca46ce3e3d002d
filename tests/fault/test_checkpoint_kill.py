"""kill -9 at random moments while checkpoints are written: nothing is ever lost."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import pytest
import torch

from checkpoint_cases import Layout, assert_same, engine_of, numbers, run
from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.folder import CheckpointFolder
from forebay.checkpoint.reader import Checkpoint
from house.tree import ROOT

_MODES = ("at once", "beside", "same")
_STEPS = 15


@pytest.fixture(scope="module")
def uninterrupted():
    with engine_of(Layout(hidden=150)) as engine:
        run(engine, 0, _STEPS)
        return numbers(engine)


def _start(folder, mode):
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), *sys.path])
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "checkpoint_worker.py"), folder, str(_STEPS), mode],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


def _round(folder, mode, chance):
    """Start, wait for a random saved step, kill a little later; returns whether it had ended."""
    worker = _start(folder, mode)
    saves = chance.randrange(1, 4)
    for line in worker.stdout:
        if line.strip() != "ready":
            saves -= 1
            if not saves:
                break
    time.sleep(chance.random() * 0.03)
    ended = worker.poll() is not None
    worker.kill()
    worker.wait(60)
    worker.stdout.close()
    return ended


def _check_newest(folder, mode):
    """The newest complete checkpoint is whole, to the last byte; beside training it may be none."""
    complete = CheckpointFolder(folder, disk=RealDisk()).complete()
    if mode == "beside" and not complete:
        return 0
    assert complete
    with Checkpoint(complete[0]) as checkpoint:
        checkpoint.verify()
        return checkpoint.manifest.counters["global_steps"]


def _killed_again_and_again(tmp_path, want, mode, rounds):
    chance = random.Random(str(tmp_path.name))
    steps = []
    for _ in range(rounds):
        if _round(tmp_path, mode, chance):
            break
        steps.append(_check_newest(tmp_path, mode))
        assert steps == sorted(steps)
    assert steps
    worker = _start(tmp_path, mode)
    worker.communicate(timeout=240)
    assert worker.returncode == 0
    assert_same(torch.load(tmp_path / "numbers.pt"), want)


@pytest.mark.parametrize(("mode", "rounds"), [("at once", 2), ("beside", 2), ("same", 1)])
def test_killed_while_saving(tmp_path, uninterrupted, mode, rounds):
    _killed_again_and_again(tmp_path, uninterrupted, mode, rounds)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", _MODES)
def test_killed_fifty_times(tmp_path, uninterrupted, mode):
    """17 rounds in each of three modes, begun again before a run reaches its end."""
    for part, rounds in enumerate((4, 4, 4, 5)):
        folder = tmp_path / str(part)
        folder.mkdir()
        _killed_again_and_again(folder, uninterrupted, mode, rounds)
