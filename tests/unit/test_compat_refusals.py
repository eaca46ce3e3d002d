"""What `initialize` refuses: one clear error, before a bit of the model is touched."""

from __future__ import annotations

import argparse
import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

import forebay
from compat_cases import ON_HOST, engine_of, same, small, train
from forebay.errors import BudgetError, ConfigError, ForebayError, UnsupportedError
from forebay.tiers.ledger import Tier

DATA = torch.utils.data.TensorDataset(torch.arange(10.0).unsqueeze(1))


def _touched(model: nn.Module, before: dict[str, torch.Tensor], at: list[int]) -> bool:
    hooks = any(
        module._forward_pre_hooks or module._state_dict_pre_hooks for module in model.modules()
    )
    moved = [param.data_ptr() for param in model.parameters()] != at
    return hooks or moved or not same(before, dict(model.state_dict()))


_MODEL_FREE = AdamW([nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ({"model": "llama"}, "of type str, not an nn.Module", "initialize(model=model"),
        ({"model": None}, "needs a model", "initialize(model=model"),
        ({"args": nn.Linear(1, 1)}, "the first argument of initialize is args", "model=model"),
        ({"mpu": object()}, "initialize(mpu=...) is not supported yet", "leave it out"),
        ({"mesh_param": (1, 1)}, "initialize(mesh_param=...)", "leave it out"),
        ({"optimizer": "AdamW"}, "of type str, not a torch.optim", '"optimizer": {"type": "AdamW"'),
        ({"optimizer": 3}, "of type int, not a torch.optim", "torch.optim.AdamW("),
        ({"optimizer": SGD}, "not torch.optim.sgd.SGD", "AdamW"),
        ({"optimizer": lambda params: None}, "returned NoneType", "lambda params"),
        ({"optimizer": _MODEL_FREE}, "none of the optimizer's 1 parameters", "after any copy"),
        ({"model_parameters": []}, "model_parameters is empty", "a generator is empty"),
        ({"model_parameters": nn.Parameter(torch.ones(1))}, "of type Parameter", "groups"),
        ({"model_parameters": {"params": []}}, "model_parameters is of type dict", "a list of"),
        ({"model_parameters": ["0.weight"]}, "an entry of type str", "model.parameters()"),
        ({"lr_scheduler": 0.1}, "lr_scheduler is of type float", "a torch scheduler"),
        ({"lr_scheduler": lambda optimizer: 1}, "returned int, which has no step()", "LambdaLR"),
        ({"lr_scheduler": LambdaLR(_MODEL_FREE, float)}, "built on another optimizer", "lambda"),
        ({"training_data": "data.json"}, "training_data is of type str", "Dataset"),
        (
            {"training_data": torch.utils.data.DataLoader(DATA)},
            "training_data is a DataLoader",
            "loader.dataset",
        ),
        ({"training_data": DATA, "collate_fn": 3}, "collate_fn is of type int", None),
        ({"config": None}, "no configuration is given", "pass config="),
        (
            {"config_params": ON_HOST},
            "given 2 times: config and config_params",
            "give config alone",
        ),
        (
            {"args": argparse.Namespace(deepspeed_config="x.json")},
            "given 2 times: config and args.deepspeed_config",
            "give config alone",
        ),
        ({"config": 3}, "it is of type int", "a dict, the path"),
        ({"config": "missing.json"}, "is no file", "a dict, the path"),
        ({"config": {"gradient_cliping": 1.0}}, "gradient_cliping", "gradient_clipping"),
        ({"config": {"train_batch_size": "auto"}}, "no optimizer", '"optimizer": {'),
    ],
)
def test_bad_input_is_one_clear_error(arguments, message, hint):
    model = small()
    before = copy.deepcopy(dict(model.state_dict()))
    at = [param.data_ptr() for param in model.parameters()]
    with pytest.raises(ForebayError) as caught:
        forebay.initialize(**{"model": model, "config": ON_HOST} | arguments)
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    if hint is None:
        assert caught.value.hint is None
    else:
        assert hint in caught.value.hint
    assert not _touched(model, before, at)


def test_a_failed_initialize_leaves_the_callers_optimizer_alone():
    """A schedule that starts at 0 must not be the next attempt's base rate."""
    model = small()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    raw = {
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1}},
    }
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(BudgetError):
        forebay.initialize(
            model=model, optimizer=optimizer, config=raw | {"forebay": {"host_budget": 10}}
        )
    assert [dict(group) for group in optimizer.param_groups] == before
    model(torch.ones(1, 7)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with forebay.initialize(model=model, optimizer=optimizer, config=raw)[0] as engine:
        train(engine, 1)
        assert engine.get_lr() == [1e-2]


def test_engines_and_their_optimizers_are_not_wrapped_twice():
    engine = engine_of()
    with engine:
        with pytest.raises(ConfigError, match="of type TrainingEngine") as caught:
            forebay.initialize(model=engine, config=ON_HOST)
        assert "model.module" in caught.value.hint
        with pytest.raises(UnsupportedError, match="forebay's own already"):
            forebay.initialize(model=small(), optimizer=engine.optimizer, config=ON_HOST)


def test_nothing_to_train():
    model = small().requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        forebay.initialize(model=model, config=ON_HOST)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [({}, False), ({"adam_w_mode": True}, True), ({"adam_w_mode": False}, True)],
)
def test_a_group_s_decay_with_adam_of_unstated_kind(params, allowed):
    model = small()
    groups = [
        {"params": [model[0].weight, model[2].weight], "weight_decay": 0.1},
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0},
    ]
    raw = ON_HOST | {"optimizer": {"type": "Adam", "params": {"lr": 1e-2, **params}}}
    if allowed:
        engine, *_ = forebay.initialize(model=model, model_parameters=groups, config=raw)
        engine.close()
        return
    with pytest.raises(ConfigError, match="does not say of which kind") as caught:
        forebay.initialize(model=model, model_parameters=groups, config=raw)
    assert "AdamW" in caught.value.hint
    no_decay, *_ = forebay.initialize(model=model, model_parameters=groups[1:], config=raw)
    no_decay.close()


def test_flags_that_are_no_bool_are_named_and_nothing_moves(tmp_path):
    engine = engine_of({"zero_optimization": {"offload_optimizer": {"device": "none"}}})
    train(engine, 1)
    before = engine.ledger.bytes(Tier.DEVICE)
    calls = {
        "pin_memory": engine.offload_states,
        "non_blocking": engine.reload_states,
        "is_boundary": engine.set_gradient_accumulation_boundary,
        "load_optimizer_states": partial(engine.load_checkpoint, tmp_path),
        "exclude_frozen_parameters": partial(engine.save_checkpoint, tmp_path),
        "scale_wrt_gas": partial(engine.backward, torch.ones(())),
        "enabled": partial(forebay.zero.GatheredParameters, engine.module),
        "flag": partial(forebay.utils.set_z3_leaf_module, small()),
    }
    for name, call in calls.items():
        for value in ("false", 1, None):
            with pytest.raises(ConfigError, match=rf"\({name}={value!r}\): it must be True or"):
                call(**{name: value})
    with pytest.raises(ConfigError, match="non_blocking='false'"):
        engine.offload_states(non_blocking="false")
    assert engine.ledger.bytes(Tier.DEVICE) == before
    assert not list(tmp_path.iterdir())
    train(engine, 1)
    engine.close()
