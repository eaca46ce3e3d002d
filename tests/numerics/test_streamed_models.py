"""Weights that come and go under every model: recomputed, saved elsewhere, shared, borrowed.

The reference is the resident engine with all state on the device.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from forebay.engine import EngineOptions, offload_with
from forebay.engine.options import Timing
from forebay.links import FaultScript
from forebay.plan import UpdatePlace, WeightPlace
from numerics.real_models import (
    CHECKPOINTS,
    DEVICE,
    MODELS,
    STREAMED,
    Job,
    by_offload,
    by_streaming,
)
from numerics.training import assert_same_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning"),
    pytest.mark.usefixtures("deterministic"),
]
LATE = FaultScript(seed=4, max_delay_us=300)
ROOMS = {
    "least": STREAMED,
    "by_parameter": replace(STREAMED, unit_elements=1, piece_elements=100),
    "late": replace(STREAMED, fault=LATE, piece_elements=200),
    "state_too": replace(STREAMED, update=UpdatePlace.STREAMED, fault=LATE),
}
AROUND = {
    "plain": torch.enable_grad,
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
}


@functools.cache
def _resident(job: Job):
    return by_offload(job, place=UpdatePlace.DEVICE)


def _cases():
    """The default run meets each value of each axis for every model."""
    thin = {
        ("least", "save_on_cpu", "non_reentrant"),
        ("by_parameter", "plain", "reentrant"),
        ("late", "plain", "stored"),
        ("state_too", "save_on_cpu", "reentrant"),
    }
    for model in MODELS:
        for room in ROOMS:
            for around in AROUND:
                for kind in CHECKPOINTS:
                    if model == "router" and kind != "stored":
                        continue
                    kept = (room, around, kind) in thin or (model == "router" and room == "late")
                    yield pytest.param(
                        model,
                        room,
                        around,
                        kind,
                        id=f"{model}-{room}-{around}-{kind}",
                        marks=[] if kept else [pytest.mark.slow],
                    )


@pytest.mark.parametrize(("model", "room", "around", "kind"), list(_cases()))
def test_same_bits(model, room, around, kind):
    dtype, micro = (torch.float32, 1) if room == "least" else (torch.bfloat16, 2)
    job = Job(model, dtype=dtype, micro=micro, checkpoints=kind)
    streamed = by_streaming(job, options=ROOMS[room], around=AROUND[around])
    assert_same_bits(_resident(job), streamed)


class _Block(nn.Module):
    def __init__(self, shared: nn.Parameter | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.lin = nn.Linear(8, 8)
        if shared is not None:
            self.lin.weight = shared

    def forward(self, x):
        return x + torch.tanh(self.lin(self.norm(x)))


class _Odd(nn.Module):
    """Blocks that are called twice, share a weight, run or not by the data, or are borrowed from.

    Args:
        kind: How it is checkpointed; None stores activations.
    """

    def __init__(self, kind: bool | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kind = kind
        self.scale = nn.Parameter(torch.ones(8))
        self.twice = nn.ModuleList(_Block() for _ in range(2))
        self.thrice = nn.ModuleList([_Block()])
        self.thrice.extend(_Block(self.thrice[0].lin.weight) for _ in range(2))
        self.branches = nn.ModuleList(_Block() for _ in range(3))
        self.lent = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def _run(self, call, *inputs):
        if self.kind is None:
            return call(*inputs)
        return checkpoint(call, *inputs, use_reentrant=self.kind)

    def _borrow(self, x):
        """Weights of modules that are not called."""
        return torch.tanh(x @ self.lent[0].weight.t()) @ self.lent[1].weight + self.lent[1].bias

    def forward(self, x, which):
        x = x * self.scale
        for block in (*self.twice, *self.twice, *self.thrice):
            x = self._run(block, x)
        left, right = self._run(self.branches[which], x), self._run(self.branches[2], x)
        return self._run(self._borrow, left * right + left) * self.scale


def _train_odd(kind: bool | None, options: EngineOptions, around=torch.enable_grad):
    model = _Odd(kind).to(DEVICE)
    source = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    _, optimizer = offload_with(
        model, source, options=replace(options, device=DEVICE, clip_norm=0.5)
    )
    losses = []
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 8, generator=generator).to(DEVICE).requires_grad_()
        with around():
            loss = (model(x, step % 2) - 1).pow(2).mean()
        loss.backward()
        losses.append((loss.item(), x.grad.sum().item()))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.clone().cpu() for name, value in model.state_dict().items()}
    optimizer.engine.ledger.check()
    optimizer.close()
    return losses, weights


_RESIDENT = EngineOptions(update=UpdatePlace.DEVICE, timing=Timing.SYNCHRONOUS)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("room", ["least", "by_parameter", "late"])
def test_odd_modules(room, kind, around):
    reentrant = CHECKPOINTS[kind]
    losses, weights = _train_odd(reentrant, _RESIDENT)
    seen, streamed = _train_odd(reentrant, ROOMS[room], AROUND[around])
    assert seen == losses
    assert len(set(losses)) == len(losses)
    for name, value in weights.items():
        assert torch.equal(value, streamed[name]), name


def test_reference_is_not_streamed():
    """What the tests above compare with keeps its weights on the device."""
    assert _RESIDENT.weights is WeightPlace.DEVICE
    assert STREAMED.weights is WeightPlace.HOST
