"""Gradients of gradients where weights are gathered for use and freed after it."""

from __future__ import annotations

import os

import torch
from torch import nn

import forebay
from distributed import ranks
from distributed.scripts import config
from distributed.training import digest


def train_with_penalty() -> list[str]:
    """Weights after training in stage 2, and in stage 3 with room for few of them."""
    return [_trained(2), _trained(3)]


def _trained(stage: int) -> str:
    settings = config(stage)
    settings["zero_optimization"]["stage3_max_live_parameters"] = 1200
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24), nn.Softplus()) for _ in range(6)]
    with forebay.initialize(model=nn.Sequential(*blocks), config=settings)[0] as engine:
        for step in range(2):
            x = torch.linspace(-1, 1, 96).view(4, 24) * (1 + step + int(os.environ["RANK"]))
            y = engine(x.requires_grad_())
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            engine.backward(slope.square().sum() + y.square().mean())
            engine.step()
        return digest(list(engine.state_dict().values()))


def test_gathered_weights_come_again_for_the_second_backward():
    results = ranks.run(2, train_with_penalty)
    assert len({weights for both in results for weights in both}) == 1
