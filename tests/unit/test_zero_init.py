"""`forebay.zero.Init`: models that are never whole in memory train as models that were."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import UnsupportedError
from forebay.model.unbuilt import UnbuiltWeight

CONFIG = {
    "train_batch_size": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


def _build() -> nn.Module:
    """Large enough that weights leave; with a frozen one, a tied one and one that stays."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(160, 160) for _ in range(4)))
    model[2].weight = model[0].weight
    model[3].weight.requires_grad_(requires_grad=False)
    model.register_parameter("own", nn.Parameter(torch.randn(130, 130)))
    return model


def _train(model: nn.Module, config: dict) -> dict[str, torch.Tensor]:
    with forebay.initialize(model=model, config=config)[0] as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 160).to(model[1].bias.dtype)).float().pow(2).sum())
            engine.step()
        return {name: value.clone() for name, value in engine.state_dict().items()}


@pytest.mark.parametrize("place", ["none", "optimizer", "param"])
@pytest.mark.parametrize("bf16", [False, True])
def test_models_built_inside_it_train_to_the_same_bits(place, bf16):
    zero = {"stage": 3}
    if place != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if place == "param":
        zero["offload_param"] = {"device": "cpu"}
    config = {**CONFIG, "zero_optimization": zero, "bf16": {"enabled": bf16}}
    with forebay.zero.Init(config_dict_or_path=config):
        model = _build()
    assert isinstance(model.own, UnbuiltWeight)
    assert model[0].weight is model[2].weight
    plain = _train(_build(), config)
    for name, value in _train(model, config).items():
        assert torch.equal(value, plain[name]), name


def test_parameters_have_the_working_dtype_when_it_ends():
    with forebay.zero.Init(config_dict_or_path={"train_batch_size": 1, "bf16": {"enabled": True}}):
        model = nn.Sequential(nn.Linear(160, 160), nn.BatchNorm1d(3))
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert model[1].running_mean.dtype is torch.float32  # as initialize leaves it
    assert nn.Linear(3, 3).weight.dtype is torch.float32
    with forebay.zero.Init(dtype=torch.bfloat16):
        mixed = nn.Sequential(nn.Linear(160, 160, dtype=torch.bfloat16), nn.LayerNorm(3))
    assert mixed[1].weight.dtype is torch.float32  # as initialize leaves it


def test_it_nests_and_can_be_switched_off():
    with forebay.zero.Init(), forebay.zero.Init():
        model = nn.Linear(160, 160)
    assert isinstance(model.weight, UnbuiltWeight)
    with forebay.zero.Init(enabled=False, dtype=torch.float16):
        model = nn.Linear(160, 160)
    assert model.weight.dtype is torch.float32
    assert not isinstance(model.weight, UnbuiltWeight)
    with pytest.raises(UnsupportedError, match="remote_device='nvme'"):
        forebay.zero.Init(remote_device="nvme")


def test_a_window_gives_parameters_memory_to_write():
    with forebay.zero.Init():
        model = _build()
    with pytest.raises(UnsupportedError, match="GatheredParameters"):
        nn.init.zeros_(model.own)
    with forebay.zero.GatheredParameters(model.own, modifier_rank=0), torch.no_grad():
        model.own.fill_(0.5)
    plain = _build()
    nn.init.constant_(plain.own, 0.5)
    trained = _train(plain, CONFIG)
    assert all(torch.equal(v, trained[name]) for name, v in _train(model, CONFIG).items())


PEAK = """
import torch, forebay
from torch import nn
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10
with forebay.zero.Init():  # loads what it needs
    nn.Linear(200, 200)
before = peak()
with forebay.zero.Init():
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(100)))
print(sum(p.nbytes for p in model.parameters()), peak() - before)
"""


@pytest.mark.slow
def test_building_100_million_parameters_takes_a_fifth_of_their_memory_at_most():
    told = subprocess.run([sys.executable, "-c", PEAK], check=True, capture_output=True, text=True)
    model_bytes, peak_bytes = map(int, told.stdout.split())
    assert model_bytes == 4 * 100 * 2**20
    assert peak_bytes < model_bytes / 5
