"""Everything that only a GPU can show: checks first, then figures, as many as the time allows.

Each run is a process of its own with a limit; what it printed and the tables that it wrote go into
the output folder, with a summary. A run that would not end in the time that is left is not begun.
The machine is measured once, unless a profile is given.

    python benchmarks/on_gpu.py --list
    python benchmarks/on_gpu.py --only exactness,states --seconds 600 --output results
    python benchmarks/on_gpu.py --drive /local_nvme --host-budget 122GiB --output results
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
# Largest blocks of the caching allocator grow instead of being cut: peaks are those of the work.
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True, slots=True)
class Run:
    """One command: words with {output}, {profile}, {budget} and {drive} filled in."""

    name: str
    seconds: int  # on an H200, the process's start included
    command: str
    gpus: int = 1

    @property
    def needs_drive(self) -> bool:
        """Whether it wants a local drive."""
        return "{drive}" in self.command


STEP = "forebay bench step --profile {profile} --host-budget {budget} --output {output} "
SCALING = "python benchmarks/scaling.py --shape 3b --device cuda --host-budget {budget} "
RUNS = (
    Run("exactness", 420, "pytest -q tests/numerics -k cuda"),
    Run("streamed", 120, "pytest -q tests/numerics/test_streamed_cuda.py"),
    Run("models", 200, "pytest -q tests/numerics/test_streamed_models.py"),
    Run("moves", 60, "pytest -q tests/unit/test_state_moves.py tests/unit/test_page_locking.py"),
    Run("files", 90, "pytest -q -m cuda tests/numerics/test_nvme.py"),
    Run("weights-in-files", 90, "pytest -q -m cuda tests/numerics/test_nvme_weights.py"),
    Run("one-rank", 60, "pytest -q -m cuda tests/distributed/test_on_cuda.py"),
    Run("w1", 260, STEP + "--size 3b --variants floor,none,host,r0,r25,r50 --steps 7"),
    Run(
        "w1-peers",
        480,
        STEP + "--size 3b --variants none,r0,deepspeed2,deepspeed3 --steps 5 --limit-seconds 200",
    ),
    Run("w2", 300, STEP + "--size 3b --accumulation 4 --variants floor,none,r0,r25,r50 --steps 5"),
    Run("w4", 240, STEP + "--size 3b --micro-batch 2,4,8,16 --variants floor,none,r0 --steps 6"),
    Run("w3", 80, STEP + "--size 7b --variants r0 --steps 4"),
    Run("24gb", 80, STEP + "--size 7b --device-budget 24GB --variants streamed+1 --steps 4"),
    Run(
        "12gb",
        100,
        STEP + "--size 7b --device-budget 12GB --variants streamed+1+0+offload --steps 5",
    ),
    Run(
        "largest",
        300,
        STEP + "--size 19b --variants streamed+2+0.53+host --micro-batch 1 "
        "--steps 3 --limit-seconds 270",
    ),
    Run("8k", 100, STEP + "--size 8k --variants device,device+offload --steps 5"),
    Run("32k", 120, STEP + "--size 32k --variants device,device+offload --micro-batch 4 --steps 4"),
    Run(
        "reads",
        80,
        "forebay bench reads --profile {profile} --host-budget {budget} --output {output}",
    ),
    Run(
        "lengths",
        90,
        "forebay bench lengths --profile {profile} --variants r0 --steps 30 --output {output}",
    ),
    Run("adam", 60, "forebay bench adam --output {output}"),
    # As much state as a model has, where the table above fits some caches of addresses.
    Run("adam-large", 90, "forebay bench adam --elements 1000000000 --threads 15 --repeats 5"),
    Run("states", 90, "forebay bench states --size 3b --variants device,r0 --output {output}"),
    Run(
        "modes",
        400,
        STEP + "--size 3b --clip 1000 --variants none,r0,r0+speculative,r25,r25+speculative,"
        "r0+delayed,r0+zenflow --steps 8",
    ),
    Run(
        "checkpoint",
        120,
        "forebay bench checkpoint --folder {drive} --millions 2000 --precision bf16 "
        "--offload cpu,none --rows 4096 --output {output}",
    ),
    Run(
        "drive",
        150,
        "forebay bench nvme --folder {drive} --size 4GiB --block 1MiB --depth 32 --output {output}",
    ),
    Run(
        "nvme-step",
        300,
        "forebay bench nvme-step --folder {drive} --size 1b --micro-batch 8 --buffers 64 "
        "--depth 32 --output {output}",
    ),
    Run(
        "predicted",
        300,
        "python benchmarks/predicted.py --host-budget {budget} --drive {drive} --output {output}",
    ),
    Run("sweep", 120, "python benchmarks/predicted.py --sweep --output {output}"),
    Run(
        "scaling",
        400,
        SCALING + "--ranks 2,1 --steps 3 --limit-seconds 60 --total-seconds 380 --output {output}",
        gpus=2,
    ),
    Run(
        "scaling-bits",
        200,
        SCALING + "--ranks 2 --variants zero1+none,zero2+cpu,zero3+cpu,zero3+params --steps 1 "
        "--deterministic --limit-seconds 60 --total-seconds 190",
        gpus=2,
    ),
)


def words_of(run: Run, values: dict[str, str]) -> list[str]:
    """The command line; tools of this environment are run as modules."""
    words = shlex.split(run.command.format(**values))
    modules = {"forebay": ["-m", "forebay"], "pytest": ["-m", "pytest"], "python": []}
    return [sys.executable, *modules[words[0]], *words[1:]]


def carry_out(words: list[str], *, limit: float, log: IO[bytes]) -> tuple[str, float]:
    """How it ended, and its seconds; whatever it started ends with it."""
    began = time.monotonic()
    environment = ALLOCATOR | dict(os.environ)
    with subprocess.Popen(
        words,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    ) as process:
        try:
            code = process.wait(limit)
            ended = "passed" if code == 0 else f"failed (exit code {code})"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return ended, time.monotonic() - began


def listing() -> str:
    """All runs, for people."""
    rows = [f"{'run':<18}{'about':>7}  command"]
    rows += [f"{run.name:<18}{run.seconds:>5} s  {run.command}" for run in RUNS]
    return "\n".join(rows)


def why_not(run: Run, *, left: float, gpus: int, drive: str | None) -> str:
    """The reason not to begin; empty where there is none."""
    if run.gpus > gpus:
        return f"not begun: it needs {run.gpus} GPUs, of which there are {gpus}"
    if run.needs_drive and drive is None:
        return "not begun: it needs --drive"
    if run.seconds > left:
        return f"not begun: it takes about {run.seconds} s, of which {max(0.0, left):.0f} are left"
    return ""


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="show the runs and end")
    parser.add_argument("--only", help="names of runs, in the order wanted, with commas")
    parser.add_argument("--seconds", type=float, default=7200, help="for all runs together")
    parser.add_argument("--host-budget", default="100GiB", help="host memory for state")
    parser.add_argument("--profile", type=Path, help="this machine's profile; default: measured")
    parser.add_argument("--drive", help="a folder on a local drive")
    parser.add_argument("--output", type=Path, default=Path("results"))
    asked = parser.parse_args()
    known = {run.name: run for run in RUNS}
    names = list(known) if asked.only is None else asked.only.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no run is called {', '.join(unknown)}; there are {', '.join(known)}")
    asked.runs = [known[name] for name in names]
    return asked


def main() -> int:
    """Run what was asked for; 1 where something failed."""
    asked = arguments()
    if asked.list:
        print(listing())
        return 0
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        print("error: torch sees no GPU here\nhint: --list shows what would run", file=sys.stderr)
        return 2
    asked.output.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + asked.seconds
    profile = (asked.profile or asked.output / "profile.json").resolve()
    runs = list(asked.runs)
    if not profile.exists():
        runs.insert(0, Run("probe", 60, "forebay probe --output {profile}"))
    values = {
        "output": str(asked.output.resolve()),
        "profile": str(profile),
        "budget": asked.host_budget,
        "drive": str(asked.drive),
    }
    found: dict[str, dict[str, object]] = {}
    for run in runs:
        left = until - time.monotonic()
        ended, seconds = why_not(run, left=left, gpus=gpus, drive=asked.drive), 0.0
        if not ended:
            with (asked.output / f"{run.name}.log").open("wb") as log:
                ended, seconds = carry_out(
                    words_of(run, values), limit=min(left, 2 * run.seconds), log=log
                )
        found[run.name] = {"ended": ended, "seconds": round(seconds, 1), "command": run.command}
        print(f"{run.name:<18}{seconds:>7.0f} s  {ended}", flush=True)
        (asked.output / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    return int(any("failed" in str(one["ended"]) for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
