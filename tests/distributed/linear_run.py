"""A run whose loss is linear in the weights, on any number of ranks; see test_other_sizes."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

import forebay
from forebay.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from numerics.bounds import Settings

ROWS, WIDTH, SAVED, LAST = 12, 9001, 2, 6
SETTINGS = Settings(lr=1e-2, weight_decay=0.1)


def rows(step: int) -> torch.Tensor:
    """Those of all ranks."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def _state(engine) -> list[torch.Tensor]:
    (param,) = engine.module.parameters()
    moments = [safe_get_full_optimizer_state(param, key) for key in ("exp_avg", "exp_avg_sq")]
    return [value.reshape(-1).clone() for value in (safe_get_full_fp32_param(param), *moments)]


def linear(folder: str, stage: int, saves: str) -> None:
    """Train from the beginning and save, or go on; what is there at either end goes into a file."""
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    torch.manual_seed(0)
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    params = {"lr": SETTINGS.lr, "weight_decay": SETTINGS.weight_decay}
    config = {
        "train_micro_batch_size_per_gpu": ROWS // size,
        "optimizer": {"type": "AdamW", "params": params},
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
    }
    engine, *_ = forebay.initialize(model=nn.Linear(WIDTH, 1, bias=False), config=config)
    with engine:
        if saves != "saves":
            engine.load_checkpoint(folder)
        first = _state(engine)
        for step in range(engine.global_steps, SAVED if saves == "saves" else LAST):
            engine.backward(engine(rows(step).chunk(size)[rank]).mean())
            engine.step()
        if saves == "saves":
            engine.save_checkpoint(folder)
        last = _state(engine)
        if rank == 0:
            torch.save([first, last], Path(folder) / f"{size}.pt")
