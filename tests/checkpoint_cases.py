"""A small run to save and resume, and what is compared afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forebay.compat.engine import TrainingEngine
from forebay.config.resolved import BatchSpec, CheckpointSpec, ResolvedConfig
from forebay.engine import EngineOptions, offload_with
from forebay.engine.options import Timing
from forebay.optim.loss_scale import DynamicLossScale, LossScaleConfig
from forebay.plan import UpdatePlace, WeightPlace
from unit.engine_cases import FILES

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "PLACES",
    "Layout",
    "Numbers",
    "assert_same",
    "batch",
    "engine_of",
    "numbers",
    "run",
    "tag_of",
]

PLACES = {
    "device": UpdatePlace.DEVICE,
    "host": UpdatePlace.HOST,
    "streamed": UpdatePlace.STREAMED,
    "weights": UpdatePlace.HOST,
    "nvme": UpdatePlace.NVME,
}


@dataclass(frozen=True)
class Layout:
    """Where state lives, and how it is cut."""

    place: str = "host"
    unit_elements: int | None = None
    dtype: torch.dtype = torch.bfloat16
    accumulation: int = 1
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    timing: Timing = Timing.DEFERRED
    hidden: int = 37


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen one, two buffers and dropout."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(13, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.middle = nn.Linear(hidden, hidden)
        self.twin = nn.Linear(hidden, hidden, bias=False)
        self.twin.weight = self.middle.weight
        self.fixed = nn.Linear(hidden, hidden)
        self.fixed.requires_grad_(requires_grad=False)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(hidden, 3)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)) * self.scalar
        return self.last(self.drop(self.fixed(self.twin(torch.tanh(self.middle(x))))))


def engine_of(layout: Layout, *, seed: int = 0) -> TrainingEngine:
    """An engine over the small model, with two groups and a schedule."""
    torch.manual_seed(seed)
    model = Net(layout.hidden).to(layout.dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    source = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, "lr": 3e-3},
        ],
        lr=1e-2,
    )
    options = EngineOptions(
        device="cpu",
        update=PLACES[layout.place],
        weights=WeightPlace.HOST if layout.place == "weights" else WeightPlace.DEVICE,
        pool_bytes=0,
        unit_elements=layout.unit_elements,
        timing=layout.timing,
        clip_norm=1.0,
        backwards=layout.accumulation,
        threads=1,
        nvme=FILES if PLACES[layout.place] is UpdatePlace.NVME else None,
    )
    if layout.dtype is torch.float16:
        scale = DynamicLossScale(LossScaleConfig(initial_scale_power=20, loss_scale_window=3))
        options = replace(options, loss_scale=scale)
    _, optimizer = offload_with(model, source, options=options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    config = ResolvedConfig(
        batch=BatchSpec(accumulation_steps=layout.accumulation), checkpoint=layout.checkpoint
    )
    return TrainingEngine(optimizer.engine, optimizer=optimizer, config=config, scheduler=scheduler)


def batch(index: int) -> torch.Tensor:
    """Data that depends on its number alone."""
    return torch.randn(5, 13, generator=torch.Generator().manual_seed(index))


def run(engine: TrainingEngine, first: int, last: int) -> list[float]:
    """Micro-steps `[first, last)`; returns their losses."""
    losses = []
    dtype = engine.module.first.weight.dtype
    for index in range(first, last):
        loss = (engine(batch(index).to(dtype)).float() - 1.0).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


Numbers = dict[str, Any]


def numbers(engine: TrainingEngine) -> Numbers:
    """Every bit that training depends on."""
    engine.synchronize()
    found: Numbers = {}
    for record in engine.core.collector.records:
        part = record.part
        found[f"master {record.label}"] = part.master_copy(record.slot).clone()
        for name in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {record.label}"] = part.state(name, record.slot).clone()
        found[f"step {record.label}"] = record.step
    for name, value in engine.module.state_dict().items():
        found[f"weight {name}"] = value.clone()
    found["lr"] = engine.get_lr()
    found["scale"] = engine.loss_scale
    found["counters"] = (engine.global_steps, engine.micro_steps, engine.global_samples)
    return found


def assert_same(left: Numbers, right: Numbers, *, only: str = "") -> None:
    """To the bit."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        if not name.startswith(only):
            continue
        if isinstance(value, torch.Tensor):
            other = right[name]
            assert value.dtype is other.dtype
            assert torch.equal(
                value.reshape(-1).contiguous().view(torch.uint8),
                other.reshape(-1).contiguous().view(torch.uint8),
            ), name
        else:
            assert value == right[name], name


def tag_of(folder: Path) -> str:
    """What `latest` names."""
    return (folder / "latest").read_text().strip()
