"""fio as a contestant: over the very file that the queue uses, where it can open that.

Another file may lie elsewhere on a disk, or in another cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.errors import StorageError
from forebay.probe.drive import Moved

if TYPE_CHECKING:
    from forebay.bench.nvme import NvmeSpec

__all__ = ["Fio"]

_ENGINES: Final = ("io_uring", "libaio")


class Fio:
    """Jobs of fio.

    Args:
        executable: The program.
        spec: What is moved; the queue's file is open already.

    Attributes:
        engines: Its engines that work here.
        notes: What differs from the queue's circumstances, and which engines do not work.
    """

    def __init__(self, executable: str, *, spec: NvmeSpec) -> None:
        self._executable, self._spec = executable, spec
        self.engines: list[str] = []
        self.notes: list[str] = []
        self._target: dict[str, list[str]] = {}
        own = [f"--directory={spec.path}", "--filename=forebay-bench"]
        shared = _open_file(spec.nbytes)
        targets = [own] if shared is None else [[f"--filename={shared}"], own]
        for engine in _ENGINES:
            said = ""
            for target in targets:
                tried = self._run(engine, "write", target, nbytes=spec.block_bytes)
                if tried.returncode == 0:
                    self._target[engine] = target
                    self.engines.append(engine)
                    if target is own:
                        self.notes.append(f"fio's {engine} has a file of its own.")
                    break
                said = " ".join((tried.stderr or tried.stdout).strip().splitlines()[-1:])
            else:
                self.notes.append(f"fio's {engine} does not work here: {said}.")

    def move(self, engine: str, action: str) -> Moved:
        """Read or write all of it, in order."""
        done = self._run(engine, action, self._target[engine], nbytes=self._spec.nbytes)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise StorageError(
                f"fio's {engine} cannot {action} {self._spec.nbytes} bytes: {' '.join(said)}",
                hint="try a smaller --size",
            )
        job = json.loads(done.stdout)["jobs"][0]
        side, seconds = job[action], job[action]["runtime"] / 1e3
        share = (job["usr_cpu"] + job["sys_cpu"]) / 100
        return Moved(
            nbytes=side["io_bytes"],
            seconds=side["io_bytes"] / (side["bw_bytes"] or 1),
            cpu_seconds=share * seconds,
            backend=engine,
        )

    def _run(
        self, engine: str, action: str, target: list[str], *, nbytes: int
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                self._executable,
                "--name=forebay",
                *target,
                f"--ioengine={engine}",
                f"--rw={action}",
                f"--bs={self._spec.block_bytes}",
                f"--iodepth={self._spec.depth}",
                f"--size={nbytes}",
                "--direct=1",
                "--thread",
                "--output-format=json",
            ],
            capture_output=True,
            text=True,
            check=False,
        )


def _open_file(nbytes: int) -> str | None:
    """A path to the file without a name, of this length, that this process has open."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            status = link.stat()
            if status.st_nlink == 0 and status.st_size == nbytes:
                return f"/proc/{os.getpid()}/fd/{link.name}"
    return None
