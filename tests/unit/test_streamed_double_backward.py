"""Gradients of gradients where weights leave between a backward and the next one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

import forebay
from forebay.errors import UnsupportedError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 24
BUDGET = "12KiB"  # about two blocks of six


class Block(nn.Module):
    """A layer of some kind, then a nonlinear one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        makers = {
            "linear": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
            "norm": lambda: nn.LayerNorm(WIDTH),
            "conv": lambda: nn.Conv1d(1, 1, 3, padding=1),
            "embedding": lambda: nn.Embedding(4, WIDTH),
        }
        self.first = makers[kind]()
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "conv":
            x = self.first(x[:, None])[:, 0]
        elif self.kind == "embedding":
            x = x * self.first(torch.arange(len(x), device=x.device))
        else:
            x = self.first(x)
        return softplus(self.second(x))


class Checkpointed(nn.Sequential):
    """Recomputes each block in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Forces(nn.Sequential):
    """Takes a gradient inside its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def _penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return slope.square().sum() + y.square().mean()


def _third(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(_penalty(model, x), x, create_graph=True)
    return slope.square().sum()


def _curvature(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def _loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum()

    found = torch.autograd.functional.hvp(_loss, x, torch.ones_like(x), create_graph=True)[1]
    return found.square().sum()


def _mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _moved(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return _penalty(model, x)


def _built(kind="linear", container=nn.Sequential, **how):
    torch.manual_seed(0)
    model = container(*(Block(kind) for _ in range(6)))
    return forebay.offload(model, torch.optim.AdamW(model.parameters()), device=DEVICE, **how)


def _inputs(seed: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x.to(DEVICE).requires_grad_()


def _trained(loss, **how):
    model, optimizer = _built(**how)
    for seed in range(2):
        loss(model, _inputs(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    optimizer.close()
    return found


@pytest.mark.parametrize(
    ("kind", "container", "loss"),
    [
        *((kind, nn.Sequential, _penalty) for kind in ("linear", "norm", "conv", "embedding")),
        ("norm", nn.Sequential, _third),
        ("norm", nn.Sequential, _curvature),
        ("norm", nn.Sequential, _moved),
        ("norm", Checkpointed, _penalty),
        ("norm", Forces, _mean),
    ],
)
def test_gradients_of_gradients_have_the_bits_of_weights_that_stay(kind, container, loss):
    model = {"kind": kind, "container": container}
    expected = _trained(loss, **model)
    found = _trained(loss, parameters="host", device_budget=BUDGET, **model)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_weights_in_files_are_read_again_for_the_second_backward(tmp_path):
    found = _trained(_penalty, parameters="nvme", nvme_path=tmp_path, device_budget=BUDGET)
    expected = _trained(_penalty)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_a_step_between_two_backwards_is_told_as_torch_tells_it():
    """Also where nothing but what the first backward saved is used by the second."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
    model, optimizer = forebay.offload(
        model,
        torch.optim.AdamW(model.parameters()),
        device=DEVICE,
        parameters="host",
        device_budget=BUDGET,
    )
    x = _inputs(0)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        slope.square().sum().backward()
    optimizer.close()


def test_functional_transforms_are_refused_and_training_goes_on():
    model, optimizer = _built(parameters="host", device_budget=BUDGET)
    with pytest.raises(UnsupportedError, match="no saved-tensor hooks"):
        torch.func.grad(lambda x: model(x).sum())(_inputs(0).detach())
    _penalty(model, _inputs(0)).backward()
    optimizer.step()
    optimizer.close()
