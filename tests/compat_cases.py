"""Shared by the tests of DeepSpeed's face: a small model, its configuration, an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import forebay
from config_cases import merged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.compat.engine import TrainingEngine

ON_HOST: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


def small(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two blocks of odd sizes, always the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3)).to(dtype)


def engine_of(
    config: dict[str, Any] | None = None, *, model: nn.Module | None = None, **arguments: Any
) -> TrainingEngine:
    """`forebay.initialize` with `ON_HOST` and what a test changes; its engine alone."""
    raw = merged(ON_HOST, config or {})
    if "optimizer" in arguments:
        del raw["optimizer"]
    engine, *_ = forebay.initialize(model=model or small(), config=raw, **arguments)
    return engine


def batches(count: int, *, rows: int = 4, seed: int = 1) -> Iterator[torch.Tensor]:
    """Inputs of `small`, always the same."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(rows, 7, generator=generator)


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss in float32, whatever the model's dtype and device."""
    first = next(iter(model.parameters()))
    out = model(x.to(first.device, first.dtype))
    return (out.float() - 0.5).square().mean()


def train(engine: TrainingEngine, count: int = 6, *, seed: int = 1) -> list[float]:
    """Train on `count` micro-batches; their losses."""
    losses = []
    for x in batches(count, seed=seed):
        loss = engine.backward(loss_of(engine, x))
        engine.step()
        losses.append(loss.item())
    return losses


def weights(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    """Copies of the newest weights, on the host."""
    return {name: value.clone().cpu() for name, value in engine.module.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of weights are equal to the bit."""
    return left.keys() == right.keys() and all(
        torch.equal(value, right[name]) for name, value in left.items()
    )


def bits_of(engine: TrainingEngine) -> list[torch.Tensor]:
    """Copies of everything that training has made: weights, step counts and moments."""
    engine.synchronize()
    found = [value.clone() for value in engine.module.state_dict().values()]
    for entry in engine.optimizer.state.values():
        found += [entry[name].clone() for name in ("step", "exp_avg", "exp_avg_sq")]
    return found


def same_bits(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Whether tensors are equal, pair by pair."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
