"""What passes over blocks in layer order: the bits of one micro-batch after the other."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from forebay.links import FaultScript
from forebay.plan import UpdatePlace
from numerics import real_models
from numerics.layer_cases import LAYER, by_layers, train
from numerics.real_models import STREAMED, Job, by_offload
from numerics.training import assert_same_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning"),
    pytest.mark.usefixtures("deterministic"),
]
LATE = replace(STREAMED, fault=FaultScript(seed=3, max_delay_us=300), piece_elements=200)
WIDTH = 16


class _Block(nn.Module):
    """Reads what it is called with, twice, and says what it thinks of it; may write into it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.judge = nn.Linear(WIDTH, 3)
        self.kind = kind

    def forward(self, x, source):
        if self.kind in ("stored", "writes"):
            return self._inner(x, source)
        return checkpoint(self._inner, x, source, use_reentrant=self.kind == "reentrant")

    def _inner(self, x, source):
        if self.kind == "writes":
            source += torch.tanh(self.judge(source.clone())).mean()
            source = source.clone()
        mixed = torch.tanh(self.own(source)) * torch.sigmoid(self.other(source))
        return torch.tanh(self.own(x) + mixed), self.judge(x)


class _Crossed(nn.Module):
    """Encoder states, residuals outside of blocks, and losses of what blocks return."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.encoder = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.blocks = nn.ModuleList(_Block(kind) for _ in range(4))
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x):
        source = self.encoder(x)
        x = start = self.first(x)
        judged, states = [], []
        for norm, block in zip(self.norms, self.blocks, strict=True):
            added, said = block(norm(x), source)
            x = x + added
            judged.append(said)
            states.append(x)
        x = x + start * states[1].sigmoid()
        x += source
        auxiliary = torch.cat(judged).softmax(-1).square().mean() + torch.stack(states).mean()
        return torch.cat([self.last(x).flatten(), auxiliary.reshape(1)])


@functools.cache
def _usual(kind: str, dtype: torch.dtype):
    return train(_Crossed(kind).to(dtype), options=STREAMED)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("stored", torch.float32),
        ("non_reentrant", torch.bfloat16),
        ("writes", torch.float32),
        pytest.param("reentrant", torch.float32, marks=pytest.mark.slow),
        pytest.param("stored", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("non_reentrant", torch.float32, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "options", [LATE, pytest.param(replace(LATE, update=UpdatePlace.STREAMED), id="visits")]
)
def test_tensors_that_pass_over_blocks(kind, dtype, options):
    usual = _usual(kind, dtype)
    layers = train(_Crossed(kind).to(dtype), options=replace(options, order=LAYER))
    assert layers[1] == usual[1]
    for name, value in usual[0].items():
        assert torch.equal(value, layers[0][name]), name


def _routed() -> nn.Module:
    config = transformers.MixtralConfig(
        **real_models._GROUPED,
        num_local_experts=3,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    )
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")


def _coder() -> nn.Module:
    model = real_models.Translator()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("routed", "non_reentrant"),
        ("coder", "stored"),
        pytest.param("routed", "stored", marks=pytest.mark.slow),
        pytest.param("coder", "non_reentrant", marks=pytest.mark.slow),
    ],
)
def test_real_models(model, kind, monkeypatch):
    """Router losses of all blocks, and encoder states that every block of a decoder reads."""
    monkeypatch.setitem(real_models.MODELS, "routed", _routed)
    monkeypatch.setitem(real_models.MODELS, "coder", _coder)
    job = Job(model, micro=3, checkpoints=kind, steps=2)
    usual = by_offload(job, place=UpdatePlace.DEVICE)
    assert_same_bits(usual, by_layers(job, LATE))
