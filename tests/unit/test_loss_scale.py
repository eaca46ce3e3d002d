"""Loss scales: powers of two, DeepSpeed's schedule, and states that are plain JSON."""

from __future__ import annotations

import json

import pytest

from forebay.engine.options import EngineOptions
from forebay.errors import ConfigError, GradientError
from forebay.optim.loss_scale import DynamicLossScale, LossScaleConfig, StaticLossScale


def dynamic(**options):
    return DynamicLossScale(LossScaleConfig(**options))


def run(scale, outcomes):
    """Feed outcomes ("x" overflowed, "." did not); the scale after each."""
    values = []
    for outcome in outcomes:
        scale.update(overflowed=outcome == "x")
        values.append(scale.value)
    return values


def test_starts_at_the_power():
    assert dynamic().value == 65536.0
    assert dynamic(initial_scale_power=0).value == 1.0


def test_doubles_after_each_window():
    scale = dynamic(initial_scale_power=2, loss_scale_window=3)
    assert run(scale, "......") == [4, 4, 8, 8, 8, 16]


def test_an_overflow_restarts_the_window():
    scale = dynamic(initial_scale_power=3, loss_scale_window=3, hysteresis=1)
    assert run(scale, ".x...") == [8, 4, 4, 4, 8]


def test_hysteresis_forgives_the_first_overflows():
    scale = dynamic(initial_scale_power=4, hysteresis=3)
    assert run(scale, "xxxxx") == [16, 16, 8, 4, 2]


def test_hysteresis_is_restored_by_a_doubling_or_by_every_good_window():
    options = {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2}
    assert run(dynamic(**options), "x.x") == [256, 256, 128]
    assert run(dynamic(**options, consecutive_hysteresis=True), "x.x.x") == [256] * 5
    assert run(dynamic(**options), "x..x") == [256, 256, 512, 512]


def test_overflow_at_the_minimum_is_an_error_and_keeps_the_scale():
    scale = dynamic(initial_scale_power=3, hysteresis=1, min_loss_scale=4.0)
    assert run(scale, "x") == [4]
    with pytest.raises(GradientError, match="smallest loss scale, 4"):
        scale.update(overflowed=True)
    assert scale.value == 4.0


def test_the_scale_stays_finite_when_nothing_ever_overflows():
    scale = dynamic(initial_scale_power=99, loss_scale_window=1)
    assert run(scale, "....") == [2.0**100] * 4


def test_state_is_json_and_resumes_exactly():
    options = {"initial_scale_power": 6, "loss_scale_window": 3, "hysteresis": 2}
    outcomes = "..x...x.x....x..."
    whole = run(dynamic(**options), outcomes)
    first = dynamic(**options)
    values = run(first, outcomes[:8])
    second = dynamic(**options)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert values + run(second, outcomes[8:]) == whole


def test_a_lower_bound_raised_before_resuming_is_respected():
    scale = dynamic(min_loss_scale=256.0)
    scale.load_state_dict({"scale": 2.0, "hysteresis": 9, "windows": 5, "last_overflow": 4})
    assert scale.value == 256.0
    assert scale.state_dict()["hysteresis"] == 2


def test_static_scale_never_moves():
    scale = StaticLossScale(128.0)
    assert run(scale, "xx..") == [128.0] * 4
    scale.load_state_dict(json.loads(json.dumps(StaticLossScale(2.0).state_dict())))
    assert scale.value == 128.0


@pytest.mark.parametrize(("value", "nearest"), [(1000.0, 1024), (3.0, 4), (0.3, 0.25)])
def test_a_scale_that_would_change_bits_is_refused_with_the_nearest(value, nearest):
    with pytest.raises(ConfigError, match=rf"(?s)fp16.loss_scale is {value:g}.*to {nearest}$"):
        StaticLossScale(value)


@pytest.mark.parametrize("value", [0.0, -2.0, float("nan"), float("inf"), 2.0**101])
def test_nonsense_is_refused(value):
    with pytest.raises(ConfigError, match=r"fp16\.loss_scale"):
        StaticLossScale(value)


@pytest.mark.parametrize(
    "options",
    [
        {"initial_scale_power": 101},
        {"initial_scale_power": 2, "min_loss_scale": 8.0},
        {"loss_scale_window": 0},
        {"hysteresis": 0},
        {"min_loss_scale": 3.0},
    ],
)
def test_settings_that_contradict_are_refused(options):
    with pytest.raises(ConfigError, match="fp16"):
        dynamic(**options)


def test_options_with_a_static_scale_are_equal():
    """Else whoever keeps results by options keeps every one, and finds none."""
    assert EngineOptions() == EngineOptions()
    assert hash(EngineOptions()) == hash(EngineOptions())
    assert StaticLossScale() == StaticLossScale(1.0) != StaticLossScale(2.0)
