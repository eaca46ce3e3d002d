"""Small models and loops for the engine's tests, and what plain PyTorch does with them."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forebay.engine import EngineOptions, offload_with
from forebay.engine.file_space import NvmeOptions
from forebay.plan import SixteenBitMaster, UpdatePlace, WeightPlace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from forebay.engine import OffloadedOptimizer

# One buffer: every piece of state comes and goes in every step.
FILES = NvmeOptions(paths=(Path(tempfile.gettempdir()),), buffer_count=1)
CPU = EngineOptions(device="cpu")
RESIDENT = EngineOptions(device="cpu", update=UpdatePlace.DEVICE)
PLACES = {
    "host": CPU,
    "resident": RESIDENT,
    "streamed": EngineOptions(device="cpu", update=UpdatePlace.STREAMED),
    "weights_away": EngineOptions(device="cpu", weights=WeightPlace.HOST, pool_bytes=0),
    "nvme": EngineOptions(device="cpu", nvme=FILES),
    "whole": EngineOptions(device="cpu", bf16_master=SixteenBitMaster.WHOLE),
    "resident_whole": EngineOptions(
        device="cpu", update=UpdatePlace.DEVICE, bf16_master=SixteenBitMaster.WHOLE
    ),
}

# Forebay rounds each operation of Adam, torch's CPU kernel fuses some: a few units in the last
# place of the update per step, far below this after a dozen steps with lr <= 1e-2.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two blocks of odd sizes, the same values every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def batches(count: int, dtype: torch.dtype = torch.float32, features: int = 4):
    """Inputs that depend on their number alone."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, features, generator=generator).to(dtype) for _ in range(count)]


def loss_of(model: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A loss with gradients that are neither constant nor tiny."""
    return (model(x).float() - 1.0).pow(2).mean()


def adamw(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    """AdamW over all parameters, with decay."""
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, "weight_decay": 0.1, **settings})


@contextlib.contextmanager
def offloaded(
    model: nn.Module,
    options: EngineOptions = CPU,
    source: torch.optim.Optimizer | None = None,
) -> Iterator[OffloadedOptimizer]:
    """The optimizer of a model in forebay's hands; closed at the end."""
    _, optimizer = offload_with(model, source or adamw(model), options=options)
    try:
        yield optimizer
    finally:
        optimizer.close()


def run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 4,
    micro: int = 1,
    features: int = 4,
) -> list[float]:
    """A plain loop; returns the losses."""
    dtype = next(model.parameters()).dtype
    losses = []
    for index, x in enumerate(batches(steps * micro, dtype, features)):
        loss = loss_of(model, x)
        loss.backward()
        losses.append(loss.item())
        if index % micro == micro - 1:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all weights, after the barrier."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def masters(optimizer: OffloadedOptimizer) -> list[torch.Tensor]:
    """Copies of all fp32 masters."""
    optimizer.engine.settle_masters()
    return [r.part.master_copy(r.slot) for r in optimizer.engine.collector.records]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Equal names and bits."""
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Equal names and, within rounding, values."""
    return left.keys() == right.keys() and all(
        torch.allclose(left[n], right[n], **CLOSE) for n in left
    )


@contextlib.contextmanager
def trained_as_plain(
    loop: Callable[..., object], options: EngineOptions = CPU
) -> Iterator[tuple[nn.Module, OffloadedOptimizer]]:
    """A model and its optimizer after `loop(model, optimizer)`, which did as in plain PyTorch."""
    plain, model = mlp(), mlp()
    expected = loop(plain, adamw(plain))
    with offloaded(model, options) as optimizer:
        assert loop(model, optimizer) == expected
        assert close(weights(model), weights(plain))
        yield model, optimizer


def check_as_plain(loop: Callable[..., object], options: EngineOptions = CPU) -> None:
    """Assert that a loop does with forebay what it does in plain PyTorch."""
    with trained_as_plain(loop, options):
        pass
