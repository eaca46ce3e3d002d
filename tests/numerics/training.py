"""A small training run on recorded data, and what is compared between two of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forebay.engine import EngineOptions, offload_with
from forebay.engine.options import Timing
from forebay.plan import UpdatePlace

if TYPE_CHECKING:
    from collections.abc import Iterator


def small_model(dtype: torch.dtype) -> nn.Module:
    """Odd sizes, an interleaved second group's worth of biases, no multiple of anything."""
    torch.manual_seed(0)
    layers = [nn.Linear(13, 37), nn.GELU(), nn.Linear(37, 11), nn.GELU(), nn.Linear(11, 3)]
    return nn.Sequential(*layers).to(dtype)


@dataclass
class Trained:
    """What a run ends with."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    masters: list[torch.Tensor]
    moments: list[torch.Tensor]
    steps: list[int]
    down: int = 0
    up: int = 0


@dataclass(frozen=True)
class Recipe:
    """How to train."""

    dtype: torch.dtype = torch.float32
    steps: int = 20
    micro: int = 1
    clip: float | None = 1.0
    device: str = "cpu"
    options: EngineOptions = field(default_factory=EngineOptions)
    # Of every group's learning rate, after each step.
    decay: float = 1.0
    # The step whose gradients are not finite.
    overflow_at: int | None = None

    def schedule(self, groups: list[dict[str, Any]]) -> None:
        """Move the learning rates on."""
        for group in groups:
            group["lr"] *= self.decay


# Between the largest and the smallest gradient norm of the runs here: clipping is active on some
# steps and idle on others (asserted where it is used).
CLIP = 1.0


def optimizer_for(model: nn.Module) -> torch.optim.AdamW:
    """Two groups that interleave in the model."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": 0.1},
            {"params": plain, "weight_decay": 0.0, "lr": 3e-3},
        ],
        lr=1e-2,
    )


def step_data(step: int, generator: torch.Generator) -> torch.Tensor:
    """One micro-batch; every fourth step has large gradients."""
    return torch.randn(5, 13, generator=generator) * (3.0 if step % 4 == 0 else 0.3)


def inputs(recipe: Recipe) -> Iterator[list[torch.Tensor]]:
    """Each step's micro-batches."""
    generator = torch.Generator().manual_seed(1)
    for step in range(recipe.steps):
        xs = [step_data(step, generator) for _ in range(recipe.micro)]
        if step == recipe.overflow_at:
            xs = [x * math.inf for x in xs]
        yield [x.to(recipe.device, recipe.dtype) for x in xs]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """In fp32."""
    return (model(x).float() - 1.0).pow(2).mean()


def train(recipe: Recipe, build=small_model, *, after=None) -> Trained:
    """Train on data that depends on the step alone; `after(optimizer)` is called after each."""
    model = build(recipe.dtype)
    source = optimizer_for(model)
    options = replace(recipe.options, device=recipe.device, clip_norm=recipe.clip)
    if recipe.dtype is torch.float16:
        from forebay.optim.loss_scale import DynamicLossScale, LossScaleConfig

        options = replace(
            options, loss_scale=DynamicLossScale(LossScaleConfig(initial_scale_power=20))
        )
    model, optimizer = offload_with(model, source, options=options)
    losses, norms = [], []
    for batch in inputs(recipe):
        for x in batch:
            loss = loss_of(model, x) / recipe.micro
            optimizer.scale(loss).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.last_grad_norm)
        recipe.schedule(optimizer.param_groups)
        if after is not None:
            after(optimizer)
    records = optimizer.engine.collector.records
    optimizer.synchronize()
    traffic = {lane.value: count for lane, count in optimizer.engine.traffic.items()}
    result = Trained(
        losses=losses,
        norms=norms,
        weights={name: value.clone().cpu() for name, value in model.state_dict().items()},
        masters=[r.part.master_copy(r.slot).cpu() for r in records],
        moments=[
            r.part.state(role, r.slot).clone().cpu()
            for r in records
            for role in ("exp_avg", "exp_avg_sq")
        ],
        steps=[r.step for r in records],
        down=traffic["down"],
        up=traffic["up"],
    )
    optimizer.close()
    return result


def assert_same_bits(left: Trained, right: Trained) -> None:
    """Losses, norms, weights, masters, moments and step counts, to the bit."""
    assert repr(left.losses) == repr(right.losses)  # NaN is equal to NaN here
    assert repr(left.norms) == repr(right.norms)
    assert left.steps == right.steps
    assert left.weights.keys() == right.weights.keys()
    for name, value in left.weights.items():
        assert torch.equal(value, right.weights[name]), name
    for a, b in zip(left.masters + left.moments, right.masters + right.moments, strict=True):
        assert torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def reference(recipe: Recipe, build=small_model) -> Trained:
    """The same recipe with all state on the device and nothing deferred."""
    options = EngineOptions(update=UpdatePlace.DEVICE, timing=Timing.SYNCHRONOUS)
    return train(replace(recipe, options=options), build)
