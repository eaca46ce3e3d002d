"""Weights in files, from the configuration to the engine's options."""

from __future__ import annotations

from typing import Any

import pytest

from config_cases import merged, refusal, resolved
from forebay.compat.api import engine_options
from forebay.config.nvme_spec import WeightFilesSpec
from forebay.engine.file_space import WeightBuffers
from forebay.plan import WeightPlace

_PARAM = "zero_optimization.offload_param"
_BOTH: dict[str, Any] = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/data"},
        "offload_param": {"device": "nvme"},
    }
}


def _with(**param: Any) -> dict[str, Any]:
    return merged(_BOTH, {"zero_optimization": {"offload_param": param}})


def _state(**offload: Any) -> dict[str, Any]:
    return merged(_BOTH, {"zero_optimization": {"offload_optimizer": offload}})


def test_every_key_reaches_the_engine() -> None:
    raw = _with(nvme_path="/data", buffer_count=3, buffer_size=2e5, max_in_cpu=0)
    config = resolved(raw)
    assert config.zero.parameter_tier == "nvme"
    assert config.zero.nvme is not None
    spec = WeightFilesSpec(buffer_count=3, buffer_elements=200_000, in_memory_elements=0)
    assert config.zero.nvme.weights == spec
    options = engine_options(config, device="cpu")
    assert options.weights is WeightPlace.NVME
    assert options.nvme is not None
    buffers = WeightBuffers(count=3, elements=200_000, in_memory_elements=0)
    assert options.nvme.weights == buffers
    assert resolved(config.as_dict()) == config


def test_the_defaults_are_deepspeed_s_but_for_the_buffers_size() -> None:
    config = resolved(_BOTH)
    assert config.zero.nvme is not None
    assert config.zero.nvme.weights == WeightFilesSpec(
        buffer_count=5, buffer_elements=None, in_memory_elements=1_000_000_000
    )


def test_with_state_in_memory_weights_are_there_too_and_it_is_said() -> None:
    config = resolved(merged(_with(max_in_cpu=5), _state(device="cpu", nvme_path=None)))
    assert config.zero.parameter_tier == "host"
    notes = {row.path: row.note for row in config.describe()}
    assert "state is in host memory, and so are the weights" in notes[f"{_PARAM}.device"]
    assert notes[f"{_PARAM}.max_in_cpu"].startswith("changes nothing")
    assert engine_options(config, device="cpu").weights is WeightPlace.HOST


def test_one_folder_may_be_written_in_two_ways() -> None:
    paths = {
        "offload_optimizer": {"nvme_path": "state"},
        "offload_param": {"nvme_path": "./state/"},
    }
    config = resolved(merged(_BOTH, {"zero_optimization": paths}))
    assert config.zero.nvme is not None
    assert config.zero.nvme.paths == ("state",)


@pytest.mark.parametrize("param", ["cpu", "none"])
def test_keys_of_files_change_nothing_elsewhere(param: str) -> None:
    config = resolved(_with(device=param, buffer_count=9, nvme_path="/other"))
    notes = {row.path: row.note for row in config.describe()}
    for name in ("buffer_count", "nvme_path"):
        assert notes[f"{_PARAM}.{name}"] == "changes nothing: it acts with device nvme only"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (_with(nvme_path="/other"), 'is "/other", and zero_optimization.offload_optimizer.nvme_p'),
        (_state(device="none", nvme_path=None), "needs optimizer state off the device too"),
        (_state(nvme_path=["/a", "/a"]), "names /a 2 times: a striped set has each folder once"),
        (merged(_BOTH, {"zero_optimization": {"stage": 2}}), "needs zero_optimization.stage 3"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(raw: dict[str, Any], message: str) -> None:
    assert message in str(refusal(raw))
