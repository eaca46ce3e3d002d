"""A benchmark's workers: several ranks of one host, and the files in which they leave figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["command", "environment", "gather", "leave", "run"]


def command(
    script: str | Path, *arguments: str, ranks: int, python: str = sys.executable
) -> list[str]:
    """What starts `script` on so many ranks of this host."""
    start = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*start, str(script), *arguments]


def environment(*, device: str = "cpu", threads: int = 1, **more: str) -> dict[str, str]:
    """The ranks' variables: no GPU where the processor is meant, and threads for each rank."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {**os.environ, **hidden, "OMP_NUM_THREADS": str(threads), **more}


def leave(folder: str | Path, name: str | int, found: Any) -> None:
    """Called by a rank: its figures, in one piece."""
    partial = Path(folder, f"{name}.json.part")
    partial.write_text(json.dumps(found))
    partial.rename(partial.with_suffix(""))


def gather(folder: str | Path) -> list[Any]:
    """What the ranks have left, in order of names."""
    return [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))]


def run(
    script: str | Path, *arguments: str, ranks: int, timeout: float, variables: dict[str, str]
) -> list[Any]:
    """What `script --worker FOLDER ARGUMENTS` leaves on each rank.

    Raises:
        CalledProcessError: A rank failed.
        TimeoutExpired: They did not end within `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = command(script, "--worker", folder, *arguments, ranks=ranks)
        subprocess.run(words, check=True, env=variables, timeout=timeout)
        return gather(folder)
