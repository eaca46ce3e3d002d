"""What ranks do whose saves and loads go wrong; see test_checkpoint_faults."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

import forebay
from distributed import scripts
from distributed.saved_runs import Run, engine_of, go_on, state
from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.folder import CheckpointFolder
from forebay.errors import CheckpointError, RankError


class FullDisk(RealDisk):
    """Takes headers and nothing else."""

    def write(self, file: int, data: memoryview, *, at: int) -> None:
        if at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(file, data, at=at)


class DeadlyDisk(RealDisk):
    """Ends the process, -9, when a file is to be made durable; leaves a note of when."""

    def __init__(self, note: Path) -> None:
        super().__init__()
        self._note = note

    def sync(self, file: int) -> None:
        self._note.touch()
        os.kill(os.getpid(), signal.SIGKILL)
        super().sync(file)


def _is(rank: int) -> bool:
    return os.environ["RANK"] == str(rank)


def full_disk(folder: str, run: Run, victim: int) -> dict[str, Any]:
    """One rank's disk is full in the second of three saves."""
    with engine_of(run) as engine:
        go_on(engine, 0, 2)
        engine.save_checkpoint(folder, "good")
        good = state(engine)
        go_on(engine, 2, 3)
        engine.wait_for_checkpoint()
        saver = engine.checkpoints._saver
        if _is(victim):
            saver._disk = FullDisk()
        said = ""
        try:
            engine.save_checkpoint(folder, "bad")
            go_on(engine, 3, 4)  # beside training the error waits for `wait_for_checkpoint`
            engine.wait_for_checkpoint()
        except CheckpointError as error:
            said = str(error)
        saver._disk = RealDisk()
        go_on(engine, engine.global_steps, 5)
        engine.save_checkpoint(folder, "after")
        after = state(engine)
        engine.wait_for_checkpoint()
        engine.load_checkpoint(folder, "good")
        assert state(engine) == good
        engine.load_checkpoint(folder)
        assert state(engine) == after
        return {"said": said, "end": after}


def plain(run: Run, last: int) -> dict[str, Any]:
    """Never saved."""
    with engine_of(run) as engine:
        go_on(engine, 0, last)
        return state(engine)


def killed(folder: str, run: Run, victim: int) -> None:
    """One rank is killed in the middle of the second save."""
    with engine_of(run) as engine:
        go_on(engine, 0, 1)
        engine.save_checkpoint(folder, "good")
        go_on(engine, 1, 2)
        if _is(victim):
            engine.checkpoints._saver._disk = DeadlyDisk(Path(folder) / "killed")
        try:
            engine.save_checkpoint(folder, "bad")
        except RankError:
            (Path(folder) / f"heard-{engine.global_rank}").touch()
            raise


def disagree(folder: str, what: str) -> list[str]:
    """Rank 1 saves or loads something else; then all go on."""
    said = []
    with engine_of(Run()) as engine:
        go_on(engine, 0, 1)
        engine.save_checkpoint(folder, "good")
        odd = _is(1)
        try:
            if what == "tag":
                engine.save_checkpoint(folder, "mine" if odd else "ours")
            elif what == "folder":
                engine.save_checkpoint(Path(folder) / ("mine" if odd else "ours"), "tag")
            elif what == "value":
                engine.save_checkpoint(folder, "x", {"value": object() if odd else 1})
            elif what == "frozen":
                engine.save_checkpoint(folder, "ours", exclude_frozen_parameters=odd)
            elif what == "scope":
                engine.load_checkpoint(folder, "good", load_module_only=odd)
            elif what == "loaded":
                engine.load_checkpoint(folder, "nothing" if odd else "good")
        except CheckpointError as error:
            said.append(str(error))
        go_on(engine, 1, 2)
        engine.save_checkpoint(folder, "good")
        return said


def saves_alone(folder: str, how: str) -> None:
    """All ranks but 1 save; it goes on training."""
    torch.manual_seed(1)
    settings = scripts.config(forebay={"rank_timeout": 2})
    engine, *_ = forebay.initialize(model=scripts.mlp(), config=settings)
    scripts.steps(engine, 1)
    try:
        if not _is(1):
            if how == "checkpoint":
                engine.save_checkpoint(folder, "alone")
            elif how == "weights":
                engine.save_16bit_model(folder)
            else:
                engine.offload_states()
        else:
            time.sleep(4)
        scripts.steps(engine, 1)
    finally:
        time.sleep(2)  # rank 0 keeps the store


def load_damaged(folder: str, run: Run) -> tuple[str, bool]:
    """What is said of a damaged file, and whether anything was changed."""
    with engine_of(run, seed=3) as engine:
        go_on(engine, 7, 8)
        before = state(engine)
        try:
            engine.load_checkpoint(folder)
        except CheckpointError as error:
            said = str(error)
        same = state(engine) == before
        go_on(engine, 8, 9)
        return said, same


def save_every_step(folder: str, run: Run, last: int) -> dict[str, Any]:
    """Go on from the newest complete checkpoint, and save after every update."""
    with engine_of(run) as engine:
        complete = CheckpointFolder(Path(folder), disk=RealDisk()).complete()
        if complete:
            engine.load_checkpoint(folder, complete[0].name.lstrip("."))
        while engine.global_steps < last:
            go_on(engine, engine.global_steps, engine.global_steps + 1)
            (Path(folder) / f"saving-{engine.global_rank}").touch()
            engine.save_checkpoint(folder, "same" if run.units == 1 else None)
            if not run.beside:
                (Path(folder) / f"saving-{engine.global_rank}").unlink()
        engine.wait_for_checkpoint()
        return state(engine)
