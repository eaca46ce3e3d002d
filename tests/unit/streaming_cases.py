"""A deep model of equal blocks whose weights live on the host, and one step with it."""

from __future__ import annotations

import torch
from torch import nn

from forebay.engine import EngineOptions
from forebay.plan import UpdatePlace, WeightPlace
from unit.engine_cases import batches, loss_of

AWAY = EngineOptions(device="cpu", weights=WeightPlace.HOST, update=UpdatePlace.HOST, pool_bytes=0)
RESIDENT = EngineOptions(device="cpu", update=UpdatePlace.DEVICE)


def deep(dtype: torch.dtype = torch.bfloat16, blocks: int = 6) -> nn.Sequential:
    """Blocks of one size, so that a pool holds a number of them: 2 x 512 bytes each in bf16."""
    torch.manual_seed(0)
    layers = [layer for _ in range(blocks) for layer in (nn.Linear(12, 12), nn.Tanh())]
    return nn.Sequential(*layers).to(dtype)


BLOCK = 1024


def step(model, optimizer, x) -> float:
    """One update; returns its loss."""
    loss = loss_of(model, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def no_hooks_are_left() -> bool:
    """Whether no saved-tensor hooks are in force: torch refuses to turn off those that are."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("there are some"):
            return True
    except RuntimeError:
        return False


def inputs(count: int) -> list[torch.Tensor]:
    """Inputs that depend on their number alone."""
    return batches(count, torch.bfloat16, features=12)
