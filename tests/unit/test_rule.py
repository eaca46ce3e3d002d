"""Adam's rule: names mean what torch means, and numbers are rounded once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from forebay.errors import ConfigError, UnsupportedError
from forebay.optim.rule import AdamRule, DecayMode, WeightDecay, float32

GROUP = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def capture(rule=WeightDecay.DECOUPLED, *, step=1, **options):
    return AdamRule(rule).capture({**GROUP, **options}, step)


def parameters():
    return [torch.nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize("step", [1, 2, 1000, 10**9])
def test_numbers_are_computed_in_double_and_rounded_once(step):
    hyper = capture(step=step)
    expected = {
        "decay": 1.0 - 3e-4 * 0.1,
        "one_minus_beta1": 1.0 - 0.9,
        "beta2": 0.95,
        "one_minus_beta2": 1.0 - 0.95,
        "eps": 1e-8,
        "bias_correction2_sqrt": math.sqrt(1.0 - 0.95**step),
        "step_size": 3e-4 / (1.0 - 0.9**step),
    }
    for name, value in expected.items():
        assert getattr(hyper, name) == float(np.float32(value)), name
    assert hyper.native() == ("decoupled", *(getattr(hyper, name) for name in expected))


def test_adam_is_not_adamw():
    assert capture(WeightDecay.DECOUPLED).decay_mode is DecayMode.DECOUPLED
    adam = capture(WeightDecay.L2)
    assert (adam.decay_mode, adam.decay) == (DecayMode.L2, float32(0.1))


@pytest.mark.parametrize("rule", WeightDecay)
def test_no_decay_is_a_mode_of_its_own(rule):
    hyper = capture(rule, weight_decay=0.0)
    assert (hyper.decay_mode, hyper.decay) == (DecayMode.NONE, 0.0)


def test_a_group_may_say_how_its_decay_is_meant():
    assert capture(WeightDecay.L2, decoupled_weight_decay=True).decay_mode is DecayMode.DECOUPLED
    assert capture(WeightDecay.DECOUPLED, decoupled_weight_decay=False).decay_mode is DecayMode.L2


def test_torch_classes_are_recognised_with_their_groups():
    adam = torch.optim.Adam(parameters(), weight_decay=0.1)
    adamw = torch.optim.AdamW(parameters(), weight_decay=0.1)
    assert AdamRule.of(adam).capture(adam.param_groups[0], 1).decay_mode is DecayMode.L2
    assert AdamRule.of(adamw).capture(adamw.param_groups[0], 1).decay_mode is DecayMode.DECOUPLED


@pytest.mark.parametrize("option", ["amsgrad", "capturable", "differentiable"])
def test_options_that_cannot_be_honoured_are_refused_by_name(option):
    for cls in (torch.optim.Adam, torch.optim.AdamW):
        with pytest.raises(UnsupportedError, match=f"{option}=True"):
            AdamRule.of(cls(parameters(), **{option: True}))
    with pytest.raises(UnsupportedError, match=option):
        capture(**{option: True})
    capture(**{option: False})


@pytest.mark.parametrize("option", ["foreach", "fused"])
@pytest.mark.parametrize("value", [None, False, True])
def test_speed_options_are_hints(option, value):
    assert capture(**{option: value}) == capture()


def test_maximize_shows_as_a_sign():
    assert capture().sign == 1.0
    assert capture(maximize=True).sign == -1.0


def test_other_optimizers_are_refused_by_name():
    class Mine(torch.optim.AdamW):
        pass

    for optimizer in (torch.optim.SGD(parameters(), lr=0.1), Mine(parameters())):
        with pytest.raises(UnsupportedError, match=type(optimizer).__name__):
            AdamRule.of(optimizer)


def test_a_tensor_learning_rate_is_read_by_value():
    rate = torch.tensor(0.25)
    first = capture(lr=rate)
    rate.fill_(0.5)
    assert capture(lr=rate).step_size == 2 * first.step_size
    assert capture(betas=(torch.tensor(0.5), 0.5)).one_minus_beta1 == 0.5


def test_a_tensor_that_wants_a_gradient_is_refused():
    with pytest.raises(UnsupportedError, match="lr is a tensor that requires a gradient"):
        capture(lr=torch.tensor(0.1, requires_grad=True))
    with pytest.raises(ConfigError, match="2 values"):
        capture(lr=torch.tensor([0.1, 0.2]))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"lr": math.nan}, "lr"),
        ({"lr": -1.0}, "lr"),
        ({"lr": math.inf}, "lr"),
        ({"lr": 1e39}, "lr"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\]"),
    ],
)
def test_numbers_out_of_range_are_refused(options, name):
    with pytest.raises(ConfigError, match=f"optimizer option {name} is"):
        capture(**options)


@pytest.mark.parametrize("name", GROUP)
def test_a_missing_option_is_named(name):
    group = {key: value for key, value in GROUP.items() if key != name}
    with pytest.raises(ConfigError, match=f"no option {name}"):
        AdamRule(WeightDecay.L2).capture(group, 1)


def test_a_zero_learning_rate_is_legal():
    hyper = capture(lr=0.0)
    assert (hyper.step_size, hyper.decay) == (0.0, 1.0)


def test_steps_count_from_one():
    with pytest.raises(ValueError, match="step 0"):
        capture(step=0)
