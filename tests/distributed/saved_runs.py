"""Training runs on several ranks that save and go on, and what is compared of them."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import forebay
from config_cases import merged
from distributed.training import digest
from forebay.checkpoint.disk import RealDisk
from forebay.checkpoint.folder import CheckpointFolder
from forebay.checkpoint.manifest import Kind
from forebay.checkpoint.reader import Checkpoint
from forebay.errors import CheckpointError
from forebay.optim.reference import round_to
from forebay.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)

# Rows of a window, for any number of ranks up to four.
_ROWS = 12
_NVME = {"device": "nvme", "nvme_path": tempfile.gettempdir(), "buffer_count": 1}
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "half": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "nvme": {"offload_optimizer": _NVME},
    "files": {
        "offload_optimizer": _NVME,
        "offload_param": {"device": "nvme", "max_in_cpu": 0, "buffer_count": 1},
    },
    "weights": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
_ZENFLOW = {
    "topk_ratio": 0.2,
    "select_strategy": "step",
    "select_interval": 4,
    "update_interval": 2,
    "full_warm_up_rounds": 1,
    "overlap_step": True,
}
_UPDATES: dict[str, dict[str, Any]] = {
    "exact": {},
    "speculative": {"gradient_clipping": 1e3, "forebay": {"update": "speculative"}},
    "delayed": {"forebay": {"update": "delayed", "warm_up_steps": 1}},
    "zenflow": {"zero_optimization": {"zenflow": _ZENFLOW}},
}


@dataclass(frozen=True)
class Run:
    """How a run is laid out.

    Attributes:
        stage: `zero_optimization.stage`.
        offload: What lies elsewhere: a name of `OFFLOADS`.
        units: `zero_optimization.sub_group_size`.
        precision: "bf16", "fp16" or "" for fp32.
        beside: `checkpoint.writer.decoupled`.
        dropout: Drawn from each rank's own generator.
        sharers: `zero_optimization.mics_shard_size`.
        keep: `forebay.keep_checkpoints`.
        update: `forebay.update`.
    """

    stage: int = 2
    offload: str = "cpu"
    units: int = 10**9
    precision: str = "bf16"
    beside: bool = False
    dropout: float = 0.1
    sharers: int = -1
    keep: int | None = None
    update: str = "exact"

    def __str__(self) -> str:
        names = (self.stage, self.offload, self.units, self.precision, self.beside, self.sharers)
        return "-".join(map(str, (*names, self.update)))


class Net(nn.Module):
    """Odd sizes, fewer elements than ranks, an empty one, a tied, two frozen, a buffer, dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(13, 151)
        self.middle = nn.Linear(151, 151)
        self.twin = nn.Linear(151, 151, bias=False)
        self.twin.weight = self.middle.weight
        self.fixed = nn.Linear(151, 107)
        self.fixed.requires_grad_(requires_grad=False)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(107, 2)
        self.empty = nn.Parameter(torch.zeros(0))
        self.register_buffer("shift", torch.arange(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twin(torch.tanh(self.middle(self.first(x))))
        return self.last(self.drop(self.fixed(x))) + self.shift


def engine_of(run: Run, *, seed: int = 0) -> Any:
    """A new engine on this rank."""
    torch.manual_seed(seed)
    model = Net(run.dropout)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": _ROWS // int(os.environ.get("WORLD_SIZE", "1")),
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 20, "warmup_num_steps": 3},
        },
        "zero_optimization": {
            "stage": run.stage,
            "sub_group_size": run.units,
            "mics_shard_size": run.sharers,
            **OFFLOADS[run.offload],
        },
        "checkpoint": {"writer": {"decoupled": run.beside}},
    }
    if run.keep is not None:
        config["forebay"] = {"keep_checkpoints": run.keep}
    if run.precision:
        config[run.precision] = {"enabled": True}
    config = merged(config, _UPDATES[run.update])
    engine, *_ = forebay.initialize(model=model, config=config)
    torch.manual_seed(seed + engine.global_rank)
    return engine


def go_on(engine: Any, first: int, last: int) -> list[float]:
    """Steps `[first, last)` on this rank's rows; returns its losses."""
    losses = []
    dtype = engine.module.first.weight.dtype
    for step in range(first, last):
        rows = torch.randn(_ROWS, 13, generator=torch.Generator().manual_seed(step))
        share = rows.chunk(engine.world_size)[engine.global_rank].to(dtype)
        loss = (engine(share).float() - 1.0).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def masters(engine: Any) -> dict[str, torch.Tensor]:
    """Whole masters and moments, on every rank."""
    found = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[name] = safe_get_full_fp32_param(param)
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{key} {name}"] = safe_get_full_optimizer_state(param, key)
    return found


def state(engine: Any) -> dict[str, Any]:
    """Every bit that training depends on."""
    engine.synchronize()
    values = masters(engine)
    records = engine.core.collector.records
    return {
        "masters": digest(list(values.values())),
        "weights": digest(list(engine.module.state_dict().values())),
        "steps": [record.step for record in records],
        "counters": (engine.global_steps, engine.micro_steps, engine.global_samples),
        "lr": engine.get_lr(),
        "scale": engine.loss_scale,
    }


def save(folder: str, runs: list[Run], saved: int, last: int) -> list[dict[str, Any]]:
    """Train each, save it under its name, and go on as if nothing had been saved."""
    results = []
    for run in runs:
        with engine_of(run) as engine:
            before = go_on(engine, 0, saved)
            engine.save_checkpoint(folder, str(run), client_state={"run": str(run)})
            at_save = state(engine)
            after = go_on(engine, saved, last)
            engine.wait_for_checkpoint()
            results.append(
                {"before": before, "at_save": at_save, "after": after, "end": state(engine)}
            )
    return results


def load(folder: str, jobs: list[tuple[Run, list[str]]], last: int) -> list[dict[str, Any]]:
    """Load checkpoints into each layout, one after the other, and go on from each."""
    results = []
    for run, tags in jobs:
        with engine_of(run, seed=5) as engine:
            go_on(engine, 20, 21)  # whatever it has done before is gone
            for tag in tags:
                path, client_state = engine.load_checkpoint(folder, tag)
                assert path == str(Path(folder) / tag)
                assert client_state == {"run": tag}
                loaded = state(engine)
                after = go_on(engine, engine.global_steps, last)
                results.append(
                    {
                        "run": str(run),
                        "tag": tag,
                        "loaded": loaded,
                        "after": after,
                        "end": state(engine),
                    }
                )
    return results


def save_weights(folder: str, run: Run) -> None:
    """Train, save a checkpoint and the weights in 16 bits, and whole masters beside them."""
    with engine_of(run) as engine:
        go_on(engine, 0, 2)
        engine.save_checkpoint(folder)
        engine.save_16bit_model(Path(folder) / "weights")
        engine.save_16bit_model(
            Path(folder) / "trained", "trained.safetensors", exclude_frozen_parameters=True
        )
        found = masters(engine)
        if engine.global_rank == 0:
            torch.save(found, Path(folder) / "masters.pt")
        go_on(engine, 2, 3)  # nobody is left waiting


def save_weights_nowhere(folder: str, run: Run) -> str:
    """Rank 0 cannot write the weights: all hear of it, and training goes on."""
    with engine_of(run) as engine:
        go_on(engine, 0, 1)
        try:
            engine.save_16bit_model(Path(folder) / "a file" / "weights")
        except CheckpointError as error:
            said = str(error)
        go_on(engine, 1, 2)
        return said


def local_values(run: Run) -> dict[str, bool]:
    """Read and write this rank's slices."""
    with engine_of(run) as engine:
        go_on(engine, 0, 1)
        rank, checks = engine.global_rank, {}
        param = engine.module.middle.weight
        whole = safe_get_full_fp32_param(param)
        held = engine.core.record_of(param).segment
        piece = slice(held.start, held.start + held.elements)
        local = safe_get_local_fp32_param(param)
        checks["slice"] = bool(torch.equal(local, whole.reshape(-1)[piece]))
        moment = safe_get_full_optimizer_state(param, "exp_avg")
        own = safe_get_local_optimizer_state(param, "exp_avg")
        checks["moment"] = bool(torch.equal(own, moment.reshape(-1)[piece]))
        new = torch.full_like(local, 1.0 + (0 if run.stage == 0 else rank) / 1000)
        safe_set_local_fp32_param(param, new)
        safe_set_local_optimizer_state(param, new, "exp_avg_sq")
        after = safe_get_full_fp32_param(param).reshape(-1)
        checks["set"] = bool(torch.equal(after[piece], new))
        checks["all"] = bool((after >= 1.0).all())
        seconds = safe_get_full_optimizer_state(param, "exp_avg_sq").reshape(-1)
        checks["state"] = bool(torch.equal(seconds, after))
        weight = engine.module.state_dict()["middle.weight"].reshape(-1)
        rounded = round_to(after, weight.dtype)
        checks["weight"] = bool(torch.equal(weight, rounded))
        go_on(engine, 1, 2)
        return checks


def load_latest(folder: str, run: Run) -> int:
    """Updates that the newest complete checkpoint has."""
    newest = CheckpointFolder(Path(folder), disk=RealDisk()).complete()[0]
    with engine_of(run, seed=4) as engine:
        engine.load_checkpoint(folder, newest.name.lstrip("."))
        return engine.global_steps


def import_plain(run: Run) -> dict[str, bool]:
    """Take over what plain torch has trained in float32, and go on."""
    torch.manual_seed(7)
    plain = Net(0.0)
    trained = [param for param in plain.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    for step in range(3):
        plain(torch.randn(4, 13, generator=torch.Generator().manual_seed(step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with engine_of(run) as engine:
        go_on(engine, 0, 1)
        engine.import_torch_state(plain.state_dict(), optimizer.state_dict())
        found, weights = masters(engine), engine.module.state_dict()
        checks = {}
        for name, param in plain.named_parameters():
            if param.requires_grad:
                checks[name] = bool(torch.equal(found[name], param.data))
                rounded = round_to(param.data, weights[name].dtype)
                checks[f"weight {name}"] = bool(torch.equal(weights[name], rounded))
                if param in optimizer.state:
                    moment = optimizer.state[param]["exp_avg"]
                    checks[f"moment {name}"] = bool(torch.equal(found[f"exp_avg {name}"], moment))
        checks["steps"] = max(record.step for record in engine.core.collector.records) == 3
        go_on(engine, 1, 2)
        return checks


def count_reads(folder: str, tag: str, runs: list[Run]) -> list[tuple[int, int]]:
    """Elements of trained parameters read, and bytes read or verified in all, of each load."""
    found = []
    read_into, raw = Checkpoint.read_into, Checkpoint._read_into
    elements = nbytes = 0

    def _counted(self: Checkpoint, into: torch.Tensor, entry: Any, role: Any, start: int) -> None:
        nonlocal elements
        elements += into.numel() if entry.kind is Kind.TRAINED else 0
        read_into(self, into, entry, role, start)

    def _raw(self: Checkpoint, left: memoryview, *args: Any, **kwargs: Any) -> None:
        nonlocal nbytes
        nbytes += len(left)
        raw(self, left, *args, **kwargs)

    for run in runs:
        with engine_of(run) as engine:
            elements = nbytes = 0
            Checkpoint.read_into, Checkpoint._read_into = _counted, _raw  # type: ignore[method-assign]
            try:
                engine.load_checkpoint(folder, tag)
            finally:
                Checkpoint.read_into, Checkpoint._read_into = read_into, raw  # type: ignore[method-assign]
            found.append((elements, nbytes))
    return found
