"""Frozen weights over ranks: adapters beside them are trained, read, written and saved."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import nn

import forebay
from distributed.scripts import config
from distributed.training import digest
from forebay.tiers.ledger import Role, Tier

WIDTH = 400


class Adapted(nn.Module):
    """A frozen matrix in 16 bits and a trained adapter of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same with what both add."""
        return x + torch.tanh(self.base(x.bfloat16()).float() + self.up(self.down(x)))


def model_of() -> nn.Module:
    """The same everywhere; two blocks share their frozen matrix."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(9, WIDTH), *(Adapted() for _ in range(5)))
    model[0].requires_grad_(requires_grad=False)
    model[4].base.weight = model[2].base.weight
    return model


def _engine(stage: int, offload: str) -> Any:
    settings = config(stage)
    settings["zero_optimization"] |= {"stage3_max_live_parameters": 0}
    if offload:
        settings["zero_optimization"]["offload_param"] = {"device": offload}
    return forebay.initialize(model=model_of(), config=settings)[0]


def train_adapters(stage: int, offload: str) -> dict[str, Any]:
    """A few updates, one rank's write to a frozen weight in between."""
    rank = int(os.environ["RANK"])
    draw = torch.Generator().manual_seed(20 + rank)
    losses = []
    with _engine(stage, offload) as engine:
        ledger = engine.core.ledger
        held = {tier.value: ledger.bytes(tier, Role.LP_PARAMS) for tier in (Tier.DEVICE, Tier.HOST)}
        frozen = sum(r.param.numel() * 2 for u in engine.core.frozen for r in u.records)
        for step in range(4):
            loss = engine(torch.randn(3, 9, generator=draw)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if step == 1:
                base = engine.module[1].base
                with forebay.zero.GatheredParameters(base, modifier_rank=1), torch.no_grad():
                    base.weight.fill_(0.01 * rank)
        copied = copy.deepcopy(engine.module).state_dict()  # of weights that are on their way
        state = engine.state_dict()
        written = float(state["1.base.weight"].float().mean())
        weights = digest(list(state.values()))
        is_copied = digest(list(copied.values())) == weights
        ledger.check()
    return {
        "losses": losses,
        "weights": weights,
        "is_copied": is_copied,
        "written": written,
        "held": held,
        "frozen": frozen,
    }


def train_everywhere() -> list[dict[str, Any]]:
    """On the device of every rank, spread over their devices, spread over their hosts."""
    return [train_adapters(1, ""), train_adapters(3, ""), train_adapters(3, "cpu")]


def save_and_go_on(folder: str) -> list[bool]:
    """Stage 3 saves, another stage 3 and a stage 1 read it."""
    checks = []
    with _engine(3, "cpu") as engine:
        with forebay.zero.GatheredParameters(engine.module[3]), torch.no_grad():
            engine.module[3].base.weight.fill_(0.5)
        engine.save_checkpoint(folder)
        engine.save_16bit_model(folder, "all.safetensors")
        expected = digest(list(engine.state_dict().values()))
    for stage, offload in ((3, ""), (1, ""), (3, "cpu")):
        with _engine(stage, offload) as engine:
            engine.load_checkpoint(folder)
            checks.append(digest(list(engine.state_dict().values())) == expected)
    return checks


def write_in_copies() -> float:
    """Two copies of the state, each over two ranks; rank 2, in the second one, writes."""
    settings = config(3)
    settings["zero_optimization"]["mics_shard_size"] = 2
    with forebay.initialize(model=model_of(), config=settings)[0] as engine:
        base = engine.module[1].base
        with forebay.zero.GatheredParameters(base, modifier_rank=2), torch.no_grad():
            base.weight.fill_(0.5 + int(os.environ["RANK"]))
        return float(engine.state_dict()["1.base.weight"].float().mean())
