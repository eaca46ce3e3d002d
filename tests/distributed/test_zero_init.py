"""Models built inside `forebay.zero.Init` on several ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import distributed, nn

import forebay
from distributed import ranks
from distributed.scripts import config
from distributed.training import digest


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(149, 160), nn.Tanh(), nn.Linear(160, 151), nn.Linear(151, 2))


def _fit(model: nn.Module, settings: dict[str, Any]) -> str:
    with forebay.initialize(model=model, config=settings)[0] as engine:
        for step in range(2):
            x = torch.linspace(-1, 1, 149).repeat(4, 1) * (1 + step + int(os.environ["RANK"]))
            engine.backward(engine(x).pow(2).mean())
            engine.step()
        return digest(list(engine.state_dict().values()))


def build_and_fit(how: str) -> list[str]:
    """Weights after training, plain and built inside Init."""
    settings = config(3)
    if how == "param":
        settings["zero_optimization"]["offload_param"] = {"device": "cpu"}
    plain = _fit(_model(), settings)
    with forebay.zero.Init(config_dict_or_path=settings):
        model = _model()
    return [plain, _fit(model, settings)]


def write_on_one_rank(backends: str) -> bool:
    """Rank 1 alone knows the values, inside Init and after it; `backends` of the script's group."""
    distributed.init_process_group("gloo")
    default = distributed.group.WORLD
    if backends == "cuda:nccl":  # a group that takes no tensors on the host

        def _broadcast(*args: Any, group: Any, **how: Any) -> Any:
            assert group not in (None, default)
            return given(*args, group=group, **how)

        given, distributed.broadcast = distributed.broadcast, _broadcast
        distributed.get_backend_config = lambda: backends
    with forebay.zero.Init():
        model = _model()
        _write(model[2].weight)
    _write(model[0].weight)
    return all(bool((model[layer].weight == 1.0).all()) for layer in (0, 2))


def _write(weight: nn.Parameter) -> None:
    with forebay.zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        weight.fill_(float(distributed.get_rank()))


def build_otherwise() -> None:
    """Rank 1 draws other numbers, after the same seed."""
    with forebay.zero.Init():
        model = _model()
        if os.environ["RANK"] == "1":
            nn.init.normal_(model[0].weight)
    forebay.initialize(model=model, config=config(3))


def _from_files(folder: str) -> nn.Module:
    with torch.device("meta"):
        model = _model()
    return forebay.zero.weights_from(model, folder)


def read_and_fit(folder: str) -> list[str]:
    """Weights after training, plain and read from files."""
    return [_fit(_model(), config(3)), _fit(_from_files(folder), config(3))]


def read_other_files(*folders: str) -> None:
    forebay.initialize(model=_from_files(folders[int(os.environ["RANK"])]), config=config(3))


def test_weights_in_files_train_as_models_that_were_whole(tmp_path):
    save_model(_model(), tmp_path / "model.safetensors")
    results = ranks.run(3, read_and_fit, str(tmp_path))
    assert len({weights for both in results for weights in both}) == 1


def test_ranks_that_have_other_files_are_told_so(tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        model = _model()
        model[2].weight.data[-1, -1] = rank
        save_model(model, tmp_path / str(rank) / "model.safetensors")
    folders = [str(tmp_path / str(rank)) for rank in range(2)]
    for kind, told in ranks.collect(ranks.start(2, read_other_files, *folders)):
        assert kind == "ConfigError"
        assert "the checksum of parameter 2.weight is recipe " in told


def test_they_train_as_models_that_were_whole():
    for how in ("optimizer", "param"):
        results = ranks.run(3, build_and_fit, how)
        assert len({weights for both in results for weights in both}) == 1


@pytest.mark.parametrize("backends", ["cpu:gloo", "cuda:nccl"])
def test_what_one_rank_writes_in_a_window_all_have(backends):
    assert ranks.run(2, write_on_one_rank, backends) == [True, True]


def test_ranks_that_built_otherwise_are_told_so():
    for kind, told in ranks.collect(ranks.start(2, build_otherwise)):
        assert kind == "ConfigError"
        assert "the checksum of parameter 0.weight is recipe " in told
