"""What two ranks' starts are compared by, and which difference is told."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from forebay.compat.same_start import Start, refuse_other_start
from forebay.config.facts import Facts
from forebay.config.resolve import resolve
from forebay.errors import ConfigError


def _start(*, dtype: torch.dtype = torch.float32, saved: float = 0.0, own: float = 0.0) -> Start:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 2)).to(dtype)
    model[0].register_buffer("mean", torch.full((), saved))
    model[0].register_buffer("place", torch.full((), own), persistent=False)
    facts = Facts(
        world_size=2, model_dtype=str(dtype).removeprefix("torch."), asker="forebay.initialize"
    )
    raw = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}
    config = resolve(raw, facts=facts)
    return Start(config=config, copies=[[0, 1]], model=model, groups=[])


def _compare(first: Start, other: Start) -> None:
    texts = [json.dumps(first.facts()), json.dumps(other.facts())]
    refuse_other_start(SimpleNamespace(compare=lambda _text, **_how: texts), other)


def test_another_dtype_is_named_and_not_what_follows_from_it():
    with pytest.raises(ConfigError, match=r"parameter 0.weight is \[2, 2\] torch.bfloat16"):
        _compare(_start(), _start(dtype=torch.bfloat16))


def test_another_buffer_is_named_where_checkpoints_hold_it():
    _compare(_start(), _start(own=1.0))
    with pytest.raises(ConfigError, match=r"the checksum of buffer 0.mean is .* on rank 1"):
        _compare(_start(), _start(saved=1.0))
