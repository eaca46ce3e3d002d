"""A process that trains and saves after every update, to be killed; see test_checkpoint_kill.

python checkpoint_worker.py FOLDER LAST_STEP MODE
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from checkpoint_cases import Layout, engine_of, numbers, run
from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.folder import CheckpointFolder
from forebay.config.resolved import CheckpointSpec


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(folder: Path, last: int, mode: str) -> None:
    """Resume from the newest complete checkpoint and go on; print each step that is saved."""
    torch.set_num_threads(1)
    spec = CheckpointSpec(keep=2, beside_training=mode == "beside")
    with engine_of(Layout(checkpoint=spec, hidden=150)) as engine:
        complete = CheckpointFolder(folder, disk=RealDisk()).complete()
        if complete:
            engine.load_checkpoint(folder, tag=complete[0].name.lstrip("."))
        _say("ready")
        while engine.global_steps < last:
            run(engine, engine.global_steps, engine.global_steps + 1)
            tag = "same" if mode == "same" else None
            engine.save_checkpoint(folder, tag)
            _say(str(engine.global_steps))
        engine.wait_for_checkpoint()
        torch.save(numbers(engine), folder / "numbers.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
