"""Ranks that come to differ on the way, or ask for different things."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed, nn

import forebay
from distributed.scripts import config
from forebay import utils
from forebay.comm.torch_group import TorchGroup
from forebay.engine import EngineOptions, offload_with
from forebay.errors import ForebayError, RankError
from forebay.links import FaultScript
from forebay.plan import UpdatePlace, WeightPlace
from unit.engine_cases import adamw
from unit.streaming_cases import deep, inputs, step


def asks_for_others(stage: int) -> list[str]:
    """Rank 1 reads and writes other parameters than rank 0, of one shape."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    own = model[int(os.environ["RANK"])].weight
    engine = forebay.initialize(model=model, config=config(stage))[0]
    part = utils.safe_get_local_fp32_param(own)
    calls: dict[str, Any] = {
        "master": lambda: utils.safe_get_full_fp32_param(own),
        "moment": lambda: utils.safe_get_full_optimizer_state(own, "exp_avg"),
        "gradient": lambda: utils.safe_get_full_grad(own),
        "slice": lambda: utils.safe_set_local_fp32_param(own, torch.ones_like(part)),
        "window": lambda: _writes_in_window(own),
    }
    said = []
    with engine:
        engine.backward(engine(torch.ones(2, 4)).pow(2).mean())
        for name, call in calls.items():
            try:
                call()
            except RankError as error:
                said.append(f"{name}: {error.message}")
        engine.step()
    return said


def _writes_in_window(weight: torch.Tensor) -> None:
    with forebay.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight.fill_(1.0)


def steps_with_other_options(stage: int, what: str) -> str:
    """Rank 1 sets another option after its first step."""
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    engine, optimizer, *_ = forebay.initialize(model=model, config=config(stage))
    try:
        for step in range(2):
            engine.backward(engine(torch.ones(2, 4)).pow(2).mean())
            if step and os.environ["RANK"] == "1":
                optimizer.param_groups[0][what] = 0.5
            engine.step()
    except RankError as error:
        return error.message
    finally:
        engine.close()
    return "stepped"


def link_fails(piece: int) -> str:
    """Rank 0's link to its host fails at a piece; what training ends with, then what closing does.

    Pieces are new weights on their way home, and the rest of the state behind them.
    """
    distributed.init_process_group("gloo")
    fault = FaultScript(
        seed=1, fail_at=piece if distributed.get_rank() == 0 else -1, fail_text="it is cut"
    )
    options = EngineOptions(
        device="cpu",
        weights=WeightPlace.HOST,
        update=UpdatePlace.STREAMED,
        pool_bytes=0,
        group=TorchGroup(),
        stage=3,
        fault=fault,
    )
    model = deep()
    optimizer = offload_with(model, adamw(model), options=options)[1]
    try:
        for x in inputs(4):
            step(model, optimizer, x)
    except ForebayError as error:
        found = f"{type(error).__name__}: {error}"
    optimizer.close()
    return found
