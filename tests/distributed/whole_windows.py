"""Whole windows on several ranks, through `forebay.initialize`."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch import nn

import forebay
from distributed.scripts import config
from distributed.training import digest


class Tied(nn.Module):
    """The first and the last layer share a weight, and two of the blocks another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(9, 14, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(14, 14) for _ in range(4))
        self.blocks[2].weight = self.blocks[0].weight
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Down through the blocks and back to 9 features."""
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if self.fails and number == 2:
                raise ValueError("bad row")
            x = x + torch.tanh(block(x))
        return x @ self.first.weight


def _loss(engine: Any, x: torch.Tensor) -> torch.Tensor:
    return engine(x).square().mean()


def _engine(order: str, stage: int) -> Any:
    settings = config(stage, gradient_accumulation_steps=3, forebay={"accumulation_order": order})
    if stage == 3:
        settings["zero_optimization"]["offload_param"] = {"device": "cpu"}
    return forebay.initialize(model=Tied(), config=settings)[0]


def fit_windows(order: str, stage: int) -> dict[str, Any]:
    """Windows of three micro-batches and one of two, then three again."""
    draw = torch.Generator().manual_seed(7 + int(os.environ["RANK"]))
    norms = []
    with _engine(order, stage) as engine:
        for count in (3, 2, 3):
            rows = [torch.randn(4, 9, generator=draw) for _ in range(count)]
            engine.train_batch(iter(rows), partial(_loss, engine))
            norms.append(engine.get_global_grad_norm())
        return {"weights": digest(list(engine.state_dict().values())), "norms": norms}


def both_orders() -> list[dict[str, Any]]:
    """Stage 1 one after the other, then stage 3 with weights on the host in layer order."""
    return [fit_windows("microbatch", 1), fit_windows("layer", 3)]


def one_rank_fails() -> None:
    """A forward of rank 1 raises in the middle of a window."""
    with _engine("layer", 3) as engine:
        for step in range(2):
            engine.module.fails = step == 1 and os.environ["RANK"] == "1"
            engine.train_batch(iter([torch.ones(4, 9)] * 3), partial(_loss, engine))
