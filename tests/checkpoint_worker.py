"""A process that trains and saves after every update, to be killed; see test_checkpoint_kill.

Processes are forked from one that has imported everything and started no thread.
"""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING

import torch

from checkpoint_cases import Layout, engine_of, numbers, run
from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.folder import CheckpointFolder
from forebay.config.resolved import CheckpointSpec

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from pathlib import Path

__all__ = ["start"]


def start(folder: Path, last: int, mode: str) -> tuple[BaseProcess, Connection]:
    """The process, and what it says: when each save begins ("saving") and ends ("saved")."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(folder, last, mode, there))
    process.start()
    there.close()
    return process, here


def _main(folder: Path, last: int, mode: str, says: Connection) -> None:
    """Resume from the newest complete checkpoint and go on."""
    torch.set_num_threads(1)
    spec = CheckpointSpec(keep=2, beside_training=mode == "beside")
    with engine_of(Layout(checkpoint=spec, hidden=150)) as engine:
        complete = CheckpointFolder(folder, disk=RealDisk()).complete()
        if complete:
            engine.load_checkpoint(folder, tag=complete[0].name.lstrip("."))
        while engine.global_steps < last:
            run(engine, engine.global_steps, engine.global_steps + 1)
            tag = "same" if mode == "same" else None
            says.send("saving")
            engine.save_checkpoint(folder, tag)
            says.send("saved")
        engine.wait_for_checkpoint()
        torch.save(numbers(engine), folder / "numbers.pt")
