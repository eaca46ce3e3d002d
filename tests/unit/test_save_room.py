"""A host budget that training fits in has room for its checkpoints too."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import forebay
from forebay import BudgetError
from forebay.units_of_measure import parse_bytes


def _engine(folder, *, budget, device="nvme", **more):
    torch.manual_seed(0)
    offload = {"device": device}
    if device == "nvme":
        offload |= {"nvme_path": str(folder), "buffer_size": 65536}
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2, "offload_optimizer": offload},
        "forebay": {"host_budget": budget},
        **more,
    }
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))
    return forebay.initialize(model=model, config=config)[0]


def _least_budget(folder, **more):
    """What the refusal of a smaller one names."""
    with pytest.raises(BudgetError) as caught:
        _engine(folder, budget="1MiB", **more)
    assert "host checkpoints" in str(caught.value)
    named = re.search(r"raise forebay.host_budget to (\w+)", caught.value.hint or "")
    assert named is not None
    return parse_bytes(named.group(1))


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("beside", [False, True])
def test_the_budget_that_a_refusal_names_is_enough_to_save(device, beside, tmp_path):
    more = {"device": device, "checkpoint": {"writer": {"decoupled": beside}}}
    budget = _least_budget(tmp_path, **more)
    with _engine(tmp_path, budget=budget, **more) as engine:
        for number in range(2):
            x = torch.randn(2, 512, generator=torch.Generator().manual_seed(number))
            engine.backward(engine(x).pow(2).mean())
            engine.step()
        engine.save_checkpoint(tmp_path / "saved")
        want = [value.clone() for value in engine.module.state_dict().values()]
    with _engine(tmp_path, budget=budget, **more) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        found = engine.module.state_dict().values()
        assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))


def test_a_refusal_names_smaller_buffers_where_they_fit(tmp_path):
    budget = _least_budget(tmp_path) - (2 << 20)
    with pytest.raises(BudgetError) as caught:
        _engine(tmp_path, budget=budget)
    assert "set buffer_count to 1 and leave buffer_size out (needs" in (caught.value.hint or "")
