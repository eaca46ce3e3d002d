"""Runs in every update mode that save and go on, at once or beside a slow disk."""

from __future__ import annotations

import time
from typing import Any

from distributed.saved_runs import Run, engine_of, go_on, masters, state
from distributed.training import digest
from forebay.checkpoint.disk import RealDisk

MODES = ("exact", "speculative", "delayed", "zenflow")
SAVED, LAST = 4, 8


class SlowDisk(RealDisk):
    """Takes its time for every write, headers first: training goes on before state is read."""

    def write(self, file: int, data: memoryview, *, at: int) -> None:
        time.sleep(0.02)
        super().write(file, data, at=at)


def truth(engine: Any) -> dict[str, Any]:
    """Masters, moments and counts of the last decided update, and the weights in force."""
    return {
        "masters": digest(list(masters(engine).values())),
        "weights": digest(list(engine.module.state_dict().values())),
        "steps": [record.step for record in engine.core.collector.records],
    }


def _plain(run: Run) -> dict[str, Any]:
    with engine_of(run) as engine:
        return {"losses": go_on(engine, 0, LAST), "end": state(engine)}


def _saved(folder: str, run: Run) -> dict[str, Any]:
    with engine_of(run) as engine:
        losses = go_on(engine, 0, SAVED)
        engine.checkpoints._saver._disk = SlowDisk()
        engine.save_checkpoint(folder, str(run))
        policy = engine.core.collector.policy
        before = getattr(policy, "taken", 0)
        losses += go_on(engine, SAVED, LAST)
        taken = getattr(policy, "taken", 0) - before
        engine.wait_for_checkpoint()
        return {"losses": losses, "end": state(engine), "taken": taken}


def save(folder: str, runs: list[Run]) -> list[dict[str, Any]]:
    """Each run as if nobody saved, saved in the middle, and what it is there."""
    results = []
    for run in runs:
        found = {"plain": _plain(run), "saved": _saved(folder, run)}
        with engine_of(run) as engine:
            go_on(engine, 0, SAVED)
            found["then"] = truth(engine)
        results.append(found)
    return results


def load(folder: str, jobs: list[tuple[Run, list[Run]]]) -> list[list[dict[str, Any]]]:
    """Load checkpoints of runs into each layout, one after the other, and go on from each."""
    results = []
    for run, saved in jobs:
        found = []
        with engine_of(run, seed=5) as engine:
            for other in saved:
                go_on(engine, 20, 22)  # whatever it has done before is gone
                engine.load_checkpoint(folder, str(other))
                loaded = truth(engine)
                losses = go_on(engine, SAVED, LAST)
                found.append({"loaded": loaded, "losses": losses, "end": state(engine)})
        results.append(found)
    return results


def save_and_load(
    folder: str, jobs: list[tuple[Run, list[Run]]]
) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """Both, in the same processes."""
    return save(folder, [run for run, _ in jobs]), load(folder, jobs)
