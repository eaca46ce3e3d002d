"""Names of `deepspeed.zero` beside those with files of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import ConfigError, UnsupportedError
from forebay.zero import Init, MiCS_Init, unwrap_model_for_generation

_STREAMED = {
    "stage": 3,
    "offload_optimizer": {"device": "cpu"},
    "offload_param": {"device": "cpu"},
}


def _engine(**zero: object):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    return forebay.initialize(model=model, config=config)[0]


@pytest.mark.parametrize("zero", [{}, _STREAMED, {**_STREAMED, "stage3_max_live_parameters": 0}])
def test_generation_has_all_weights_and_training_goes_on(zero):
    with _engine(**zero) as engine:
        x = torch.randn(4, 64, device=engine.device)
        engine.backward(engine(x).square().mean())
        engine.step()
        with torch.no_grad():
            expected = engine(x)
        for given in (engine, engine.module):
            with unwrap_model_for_generation(given) as model, torch.no_grad():
                assert model is given
                assert torch.equal(model(x), expected)
                assert not any(param.isnan().any() for param in engine.module.parameters())
        engine.backward(engine(x).square().mean())
        engine.step()
        assert engine.global_steps == 2


def test_what_is_no_model_is_refused():
    block = unwrap_model_for_generation(3)
    with pytest.raises(ConfigError, match="is given a int"):
        block.__enter__()


@pytest.mark.parametrize(
    "argument",
    [
        {"zero_quantized_weights": True},
        {"zero_quantized_nontrainable_weights": True},
        {"zero_param_parallel_group": 2},
        {"sequence_data_parallel_group": object()},
        {"param_swapper": object()},
        {"mpu": object()},
    ],
)
def test_init_refuses_by_name(argument):
    (name,) = argument
    with pytest.raises(
        UnsupportedError, match=rf"zero.Init\({name}=...\) .*\nhint: leave {name} out"
    ):
        Init(**argument)
    Init(**dict.fromkeys(argument, False))
    assert MiCS_Init is Init


def test_init_is_given_one_configuration():
    with pytest.raises(ConfigError, match="two names of one argument"):
        Init(config_dict_or_path={}, config={})
