"""Models on the meta device: each parameter is read straight to where it is to live."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import forebay
from forebay.engine import EngineOptions
from forebay.errors import CheckpointError, UnsupportedError
from forebay.plan import UpdatePlace, WeightPlace
from unit.engine_cases import PLACES, adamw, offloaded, run, same, weights

AWAY = EngineOptions(device="cpu", weights=WeightPlace.HOST, update=UpdatePlace.HOST, pool_bytes=0)


def _model() -> nn.Module:
    """A tied weight, a frozen one and a buffer with a value."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 3))
    model[2].weight = model[0].weight
    model[3].bias.requires_grad_(requires_grad=False)
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    return model


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        model = _model()
    model.scratch = torch.zeros(3)
    return model


@pytest.fixture
def saved(tmp_path):
    state = {name: value.clone() for name, value in _model().state_dict().items()}
    del state["2.weight"]  # as savers do with tied weights
    save_file({name: state[name] for name in list(state)[:2]}, tmp_path / "a.safetensors")
    save_file({name: state[name] for name in list(state)[2:]}, tmp_path / "b.safetensors")
    return tmp_path


@pytest.mark.parametrize("place", [*PLACES, "least"])
def test_they_train_as_models_with_values(place, saved):
    options = AWAY if place == "least" else PLACES[place]
    plain, model = _model(), forebay.zero.weights_from(_on_meta(), saved)
    source = adamw(model)
    with offloaded(plain, options) as expected, offloaded(model, options, source) as optimizer:
        assert run(model, optimizer, features=12) == run(plain, expected, features=12)
        assert same(weights(model), weights(plain))
        assert model[2].weight is model[0].weight
        assert not any(param.is_meta for param in model.parameters())


def test_without_values_they_are_refused(saved):
    model = _on_meta()
    with pytest.raises(UnsupportedError, match=r"parameter 0\.weight is on the meta device"):
        forebay.offload(model, adamw(model), device="cpu")
    model.register_buffer("late", torch.empty(2, device="meta"))
    forebay.zero.weights_from(model, saved)
    with pytest.raises(UnsupportedError, match="buffer late is on the meta device"):
        forebay.offload(model, adamw(model), device="cpu")


def test_files_of_another_model_are_refused_and_change_nothing(saved, tmp_path):
    with pytest.raises(CheckpointError, match="holds no safetensors files"):
        forebay.zero.weights_from(_on_meta(), tmp_path / "nowhere")
    model = _on_meta()
    model[3].register_parameter("more", nn.Parameter(torch.empty(2, device="meta")))
    with pytest.raises(CheckpointError, match=r"has no weights named 3\.more"):
        forebay.zero.weights_from(model, saved)
    save_file({"0.weight": torch.zeros(2, 2)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"0\.weight has the shape \[2, 2\]"):
        forebay.zero.weights_from(model, saved)
    assert all(param.is_meta for param in model.parameters())


def test_budgets_hold_for_them_too(saved):
    model = forebay.zero.weights_from(_on_meta(), saved)
    with offloaded(model, replace(AWAY, device_budget=4096), adamw(model)) as optimizer:
        run(model, optimizer, features=12)
        optimizer.engine.ledger.check()
