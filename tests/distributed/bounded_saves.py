"""Ranks that save beside training in less memory than the state takes; see test_bounded_saves."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import forebay
from distributed.training import digest
from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.manifest import BLOCK_BYTES
from forebay.errors import RankError
from forebay.tiers.ledger import Role, Tier
from forebay.utils import safe_set_full_optimizer_state

_WIDTH, _LAYERS, _ROWS = 1024, 6, 4
_LIMIT_SECONDS = 3
_NVME = {"device": "nvme", "nvme_path": tempfile.gettempdir(), "buffer_count": 1}
_OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "nvme": {"offload_optimizer": _NVME},
    "weights": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


@dataclass(frozen=True)
class Case:
    """A run that saves.

    Attributes:
        stage: `zero_optimization.stage`.
        offload: A name of `_OFFLOADS`.
        update: `forebay.update`.
        slow_seconds: By rank: from the save on, how long its disk takes no data.
        writes_by_hand: Whether moments are set between the save and the next step.
    """

    stage: int = 2
    offload: str = "cpu"
    update: str = "exact"
    slow_seconds: tuple[float, ...] = (0.0, 0.0)
    writes_by_hand: bool = False


class LateDisk(RealDisk):
    """Takes no data for some seconds; may end the process, -9, in the midst of that."""

    def __init__(self, seconds: float, *, note: Path | None = None) -> None:
        super().__init__()
        self._until = time.monotonic() + seconds
        self._note = note

    def write(self, file: int, data: memoryview, *, at: int) -> None:
        if at:
            if self._note is not None:
                time.sleep(1.5)  # the others have come to where they wait
                self._note.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(max(0.0, self._until - time.monotonic()))
        super().write(file, data, at=at)


def engine_of(case: Case) -> Any:
    """A new engine on this rank; its state is several times the staging."""
    torch.manual_seed(0)
    layers = [nn.Linear(_WIDTH, _WIDTH, bias=number == 0) for number in range(_LAYERS)]
    config = {
        "train_micro_batch_size_per_gpu": _ROWS,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": case.stage,
            "sub_group_size": _WIDTH * _WIDTH,
            **_OFFLOADS[case.offload],
        },
        "checkpoint": {"writer": {"decoupled": True}},
        "forebay": {
            "checkpoint_staging": BLOCK_BYTES,
            "rank_timeout": _LIMIT_SECONDS,
            "update": case.update,
        },
    }
    engine, *_ = forebay.initialize(model=nn.Sequential(*layers), config=config)
    return engine


def _go_on(engine: Any, first: int, last: int) -> None:
    for step in range(first, last):
        seed = 10 * step + engine.global_rank
        rows = torch.randn(_ROWS, _WIDTH, generator=torch.Generator().manual_seed(seed))
        engine.backward(engine(rows.bfloat16()).float().square().mean())
        engine.step()


def _state(engine: Any) -> list[str]:
    """What this rank holds of masters and moments, and all weights."""
    engine.synchronize()
    held = []
    for record in engine.core.collector.records:
        held.append(record.part.master_copy(record.slot))
        held += [record.part.state(role, record.slot) for role in ("exp_avg", "exp_avg_sq")]
    return [digest(held), digest(list(engine.module.state_dict().values()))]


def _staged(engine: Any) -> int:
    return engine.ledger.bytes(Tier.HOST, Role.STAGING)


def save(folder: str, case: Case) -> dict[str, Any]:
    """Save beside training with slow disks, go on, and load what was saved."""
    found: dict[str, Any] = {}
    with engine_of(case) as engine:
        _go_on(engine, 0, 2)
        if case.update == "exact":
            found["at_save"] = _state(engine)
        saver = engine.checkpoints._saver
        saver._disk = LateDisk(case.slow_seconds[engine.global_rank])
        before, began = _staged(engine), time.monotonic()
        engine.save_checkpoint(folder, "beside")
        found["staged"] = _staged(engine) - before
        if case.writes_by_hand:
            for param in engine.module.parameters():
                safe_set_full_optimizer_state(param, torch.zeros_like(param), "exp_avg")
        _go_on(engine, 2, 3)
        found["seconds"] = time.monotonic() - began
        _go_on(engine, 3, 4)
        found["end"] = _state(engine)
        engine.wait_for_checkpoint()
        found["stall"] = engine.checkpoints.last.stall_seconds
        found["left"] = _staged(engine) - before
        engine.load_checkpoint(folder, "beside")
        if case.update == "exact":
            found["loaded"] = _state(engine)
        if not case.writes_by_hand:
            _go_on(engine, 2, 4)
        found["again"] = _state(engine)
    return found


def plain(case: Case) -> list[str]:
    """Never saved."""
    with engine_of(case) as engine:
        _go_on(engine, 0, 4)
        return _state(engine)


def killed(folder: str, case: Case, victim: int) -> None:
    """One rank is killed while it writes and the others wait with their step."""
    with engine_of(case) as engine:
        _go_on(engine, 0, 1)
        seconds = case.slow_seconds[engine.global_rank]
        note = Path(folder) / "killed" if engine.global_rank == victim else None
        engine.checkpoints._saver._disk = LateDisk(seconds, note=note)
        engine.save_checkpoint(folder, "beside")
        try:
            _go_on(engine, 1, 2)
        except RankError:
            (Path(folder) / f"heard-{engine.global_rank}").touch()
            raise


def save_twice(folder: str, case: Case) -> None:
    """A rank that alone waits for its checkpoint, and saves without a step in between."""
    with engine_of(case) as engine:
        _go_on(engine, 0, 1)
        engine.save_checkpoint(folder, "first")
        if engine.global_rank:
            engine.wait_for_checkpoint()
        engine.save_checkpoint(folder, "second")
        if not engine.global_rank:
            engine.wait_for_checkpoint()
        _go_on(engine, 1, 3)
