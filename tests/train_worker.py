"""The command line in a process that kills itself, -9, at the n-th of some moments.

Processes are forked from one that has imported everything and started no thread.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import torch

from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.folder import CheckpointFolder
from forebay.cli.main import main
from forebay.compat.steps import MicroSteps
from forebay.train.report import RunReporter

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MOMENTS", "run_until_killed"]

# What is called just after the moment at which the process ends.
MOMENTS: dict[str, tuple[type, str]] = {
    "in a window": (MicroSteps, "backward"),
    "before the update": (MicroSteps, "step"),
    "after the update": (RunReporter, "step"),
    "before a save is written": (CheckpointFolder, "begin"),
    "while a save is written": (RealDisk, "sync"),
    "before a save is complete": (CheckpointFolder, "commit"),
    "before latest": (CheckpointFolder, "point_latest"),
}


def kill_at(moment: str, count: int) -> None:
    """Let this process end when something is called for the n-th time."""
    owner, name = MOMENTS[moment]
    real: Callable[..., Any] = getattr(owner, name)
    left = count

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(owner, name, counted)


def _run(moment: str, count: int, words: list[str]) -> None:
    torch.set_num_threads(1)
    kill_at(moment, count)
    sys.exit(main(words))


def run_until_killed(moment: str, count: int, words: list[str]) -> int:
    """The exit code: that of the command, or the negative number of the signal."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["forebay.train.run", "transformers", __name__])
    process = context.Process(target=_run, args=(moment, count, words))
    process.start()
    process.join(240)
    assert process.exitcode is not None
    return process.exitcode
