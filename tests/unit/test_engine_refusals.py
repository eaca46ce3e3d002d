"""Models that another engine has taken over, or that are not there yet, are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from forebay import (
    BudgetError,
    ConfigError,
    ForebayWarning,
    GradientError,
    UnsupportedError,
    offload,
)
from forebay.engine import offload_with
from forebay.plan import forecast
from unit.engine_cases import CPU, adamw, batches, loss_of, mlp, offloaded, run, same, weights


class DistributedDataParallel(nn.Module):
    """Stands for torch's, which needs a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class FSDPModule:
    """The class that fully_shard mixes in."""


class Sharded(nn.Linear, FSDPModule):
    pass


class DTensor(torch.Tensor):
    """Stands for a distributed tensor."""


def _distributed() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 2).as_subclass(DTensor))
    return model


REFUSED = {
    "ddp": (lambda: DistributedDataParallel(mlp()), r"model\.module"),
    "fsdp2": (lambda: Sharded(2, 2), "fully_shard"),
    "dtensor": (_distributed, "DTensor"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "meta device"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_models(kind):
    make, match = REFUSED[kind]
    model = make()
    with pytest.raises(UnsupportedError, match=match):
        offload_with(model, torch.optim.AdamW(model.parameters()), options=CPU)
    assert not model._forward_pre_hooks


def test_lazy_modules():
    model = nn.Sequential(nn.LazyLinear(3))
    source = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    with pytest.raises(UnsupportedError, match="lazy"):
        offload_with(model, source, options=CPU)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_impossible_clipping(value):
    model = mlp()
    for given in (value, True):
        with pytest.raises(ConfigError, match="positive"):
            offload(model, adamw(model), device="cpu", clip_norm=given)
    with offloaded(model) as optimizer, pytest.raises(ConfigError, match="positive"):
        optimizer.clip_grad_norm_(value)


@pytest.mark.parametrize("device", ["cuda", "xpu", "tpu", "cuda:x", 1.5])
def test_devices_that_are_not_there(device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    model = mlp()
    with pytest.raises(UnsupportedError, match=str(device)):
        offload(model, adamw(model), device=device)


def test_a_flag_is_true_or_false():
    model = mlp()
    with pytest.raises(ConfigError, match="synchronous is 'no'"):
        offload(model, adamw(model), device="cpu", synchronous="no")


def test_sums_that_nobody_announced_and_that_do_not_fit():
    """The second backward needs fp32 room; without it the window is void, training goes on."""
    model = mlp(torch.bfloat16)
    with offloaded(mlp(torch.bfloat16)) as optimizer:
        planned = forecast(optimizer.engine.placement, device_page_bytes=4096)
    needed = sum(value for (tier, _), value in planned.items() if tier == "host")
    with offloaded(model, replace(CPU, host_budget=needed)) as optimizer:
        xs = batches(2, torch.bfloat16)
        before = weights(model)
        loss_of(model, xs[0]).backward()
        with pytest.raises(BudgetError, match="host_budget"):
            loss_of(model, xs[1]).backward()
        with pytest.raises(GradientError, match="raised"):
            optimizer.step()
        assert same(before, weights(model))
        optimizer.zero_grad()
        run(model, optimizer, steps=2)


def test_learned_sums_that_do_not_fit_are_made_one_by_one():
    """The second backward reaches the last layer alone; its sum fits, a planned one for all not."""

    def _loop(model, optimizer):
        for x in batches(3, torch.bfloat16):
            loss_of(model, x).backward()
            loss_of(model[2], torch.ones(2, 7, dtype=torch.bfloat16)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    with offloaded(mlp(torch.bfloat16)) as optimizer:
        planned = forecast(optimizer.engine.placement, device_page_bytes=4096)
    needed = sum(value for (tier, _), value in planned.items() if tier == "host")
    model, plenty = mlp(torch.bfloat16), mlp(torch.bfloat16)
    with offloaded(plenty) as optimizer:
        expected = _loop(plenty, optimizer)
    sums, ring = 4096, 4 * 4096
    tight = replace(CPU, host_budget=needed + sums + ring)
    with offloaded(model, tight) as optimizer:
        with pytest.warns(ForebayWarning, match="2 backwards per update") as caught:
            found = _loop(model, optimizer)
        assert len(caught) == 1
        assert same(found, expected)
