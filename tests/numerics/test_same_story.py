"""A script with `initialize` and a plain loop with `offload` tell the same story, bit for bit.

With a schedule, clipping, accumulation, two parameter groups and, in fp16, a loss scale that
overflows at first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import forebay
from forebay import utils
from forebay.config.facts import Facts
from forebay.config.resolve import resolve
from forebay.optim.schedule import Schedule

pytestmark = pytest.mark.usefixtures("deterministic")

STEPS, ACCUMULATION, ROWS = 12, 3, 4
# Between the largest and the smallest norm of the runs here (asserted below).
CLIP = 21.2
SCHEDULES: dict[str, dict[str, Any] | None] = {
    "function": None,
    "WarmupDecayLR": {"total_num_steps": 20, "warmup_num_steps": 5, "warmup_type": "linear"},
    "WarmupCosineLR": {"total_num_steps": 20, "warmup_num_steps": 4},
    "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": 2e-2, "cycle_first_step_size": 5},
}


@dataclass
class Story:
    """What a run tells."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 17), nn.GELU(), nn.Linear(17, 5)).to(dtype)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """The second layer first, and interleaved: order and rates are the user's."""
    params = list(model.parameters())
    return [
        {"params": params[3:] + params[:1], "weight_decay": 0.1},
        {"params": params[1:3], "weight_decay": 0.0, "lr": 3e-3},
    ]


def _batches():
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        size = 3.0 if step % 3 == 0 else 0.3
        yield [torch.randn(ROWS, 9, generator=generator) * size for _ in range(ACCUMULATION)]


def _loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    weight = next(iter(model.parameters()))
    return (model(x.to(weight.device, weight.dtype)).float() - 1.0).square().sum()


def _config(name: str, place: str, dtype: torch.dtype) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": place}},
    }
    if dtype is torch.float16:
        config["fp16"] = {"enabled": True}
    if SCHEDULES[name] is not None:
        config["scheduler"] = {"type": name, "params": SCHEDULES[name]}
    return config


def _curve(step: int) -> float:
    return min((step + 1) / 4, 1.0)


def _values(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for param in model.parameters():
        found.append(utils.safe_get_full_fp32_param(param).cpu())
        found += [
            utils.safe_get_full_optimizer_state(param, key).cpu()
            for key in ("exp_avg", "exp_avg_sq")
        ]
        found.append(param.detach().clone().cpu())
    return found


def with_initialize(name: str, place: str, dtype: torch.dtype) -> Story:
    """DeepSpeed's loop."""
    model, story = _model(dtype), Story()
    engine, *_ = forebay.initialize(
        model=model,
        optimizer=AdamW(_groups(model), lr=1e-2),
        config=_config(name, place, dtype),
        lr_scheduler=(lambda opt: LambdaLR(opt, _curve)) if name == "function" else None,
    )
    with engine:
        for window in _batches():
            story.rates.append(engine.get_lr())
            for x in window:
                loss = engine.backward(_loss(engine, x))
                engine.step()
                story.losses.append(loss.item())
            story.norms.append(engine.get_global_grad_norm())
        story.values = _values(model)
    return story


def with_offload(name: str, dtype: torch.dtype) -> Story:
    """A loop as torch users write it."""
    model, story = _model(dtype), Story()
    own = AdamW(_groups(model), lr=1e-2)
    if name == "function":
        scheduler: Any = LambdaLR(own, _curve)
    else:
        facts = Facts(model_dtype="float32" if dtype is torch.float32 else None)
        raw = _config(name, "cpu", dtype)
        if dtype is torch.bfloat16:
            raw["bf16"] = {"enabled": True}
        spec = resolve(raw, facts=facts).scheduler
        assert spec is not None
        scheduler = Schedule(own, spec)
    model, optimizer = forebay.offload(model, own, clip_norm=CLIP)
    for window in _batches():
        story.rates.append([group["lr"] for group in optimizer.param_groups])
        for x in window:
            loss = _loss(model, x)
            optimizer.scale(loss / ACCUMULATION).backward()
            story.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        story.norms.append(optimizer.last_grad_norm)
        if not optimizer.overflow:
            scheduler.step()
    story.values = _values(model)
    optimizer.close()
    return story


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("place", ["cpu", "none"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_two_ways_give_the_same_bits(name, place, dtype):
    told, plain = with_initialize(name, place, dtype), with_offload(name, dtype)
    assert told.losses == plain.losses
    assert repr(told.norms) == repr(plain.norms)  # NaN is NaN here
    assert told.rates == plain.rates
    assert len(told.rates[0]) == 2
    assert len({tuple(rates) for rates in told.rates}) > 2
    finite = [norm for norm in told.norms if norm < float("inf")]
    assert min(finite) < CLIP < max(finite)
    if dtype is torch.float16:  # 2**16 times gradients of order 1: the first updates are skipped
        assert len(finite) < STEPS
    for left, right in zip(told.values, plain.values, strict=True):
        assert torch.equal(left, right)


# The rate of update 0 for an optimizer with lr 0.01, by the reference page's formulas.
FIRST = {
    "WarmupLR": ({"warmup_min_lr": 2e-3, "warmup_num_steps": 10}, 2e-3),
    "WarmupDecayLR": ({"warmup_min_lr": 3e-3, "warmup_num_steps": 5, "total_num_steps": 9}, 3e-3),
    "WarmupCosineLR": (
        {"warmup_min_ratio": 0.25, "warmup_num_steps": 5, "total_num_steps": 9},
        2.5e-3,
    ),
    "OneCycle": ({"cycle_min_lr": 4e-3, "cycle_max_lr": 8e-3, "cycle_first_step_size": 3}, 4e-3),
    "LRRangeTest": ({"lr_range_test_min_lr": 5e-3, "lr_range_test_step_size": 3}, 5e-3),
}


@pytest.mark.parametrize("name", FIRST)
def test_the_first_update_uses_the_first_value(name):
    params, rate = FIRST[name]

    def run(*, scheduled: bool) -> tuple[list[float], list[torch.Tensor]]:
        model = _model(torch.float32)
        optimizer = AdamW(model.parameters(), lr=1e-2 if scheduled else rate)
        config = _config("function", "cpu", torch.float32)
        if scheduled:
            config["scheduler"] = {"type": name, "params": params}
        engine, *_ = forebay.initialize(model=model, optimizer=optimizer, config=config)
        if scheduled:
            betas = engine.get_mom()[0]
        else:
            # OneCycle moves the momentum too; its first value governs as well
            betas = first_betas
            optimizer.param_groups[0]["betas"] = betas
        with engine:
            rates = engine.get_lr()
            for x in next(_batches()):
                engine.backward(_loss(engine, x))
                engine.step()
            return [*rates, *betas], _values(model)

    first_betas = (0.9, 0.999)
    scheduled_numbers, scheduled = run(scheduled=True)
    assert scheduled_numbers[0] == pytest.approx(rate, rel=1e-12)
    first_betas = (scheduled_numbers[1], scheduled_numbers[2])
    _, constant = run(scheduled=False)
    for left, right in zip(scheduled, constant, strict=True):
        assert torch.equal(left, right)
