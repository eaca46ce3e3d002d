"""Schedules against formulas written out here, and the scheduler as torch knows it."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LRScheduler

from config_cases import resolved
from forebay.config import SchedulerSpec
from forebay.errors import ConfigError
from forebay.optim.curves import OneCycle, RangeTest, Warmup, WarmupCosine, WarmupDecay
from forebay.optim.schedule import Schedule


def _spec(kind: str, **params: Any) -> SchedulerSpec:
    spec = resolved({"scheduler": {"type": kind, "params": params}}).scheduler
    assert spec is not None
    return spec


def _optimizer(*rates: float) -> torch.optim.AdamW:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates]
    return torch.optim.AdamW(groups)


def _rates(schedule: Schedule, optimizer: torch.optim.Optimizer, updates: int) -> list[list[float]]:
    """The rates that each of the first updates runs with."""
    used = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(updates):
            used.append([group["lr"] for group in optimizer.param_groups])
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            schedule.step()
    return used


@pytest.mark.parametrize("num_steps", [0, 1, 2, 10])
def test_linear_warmup(num_steps: int) -> None:
    curve = Warmup(min_lr=0.1, max_lr=0.5, num_steps=num_steps, shape="linear")
    for step in range(15):
        done = min(1.0, step / num_steps) if num_steps else 1.0
        assert curve.lr(step, 9.0) == 0.1 + 0.4 * done


@pytest.mark.parametrize("num_steps", [2, 3, 1000])
def test_log_warmup(num_steps: int) -> None:
    curve = Warmup(min_lr=0.0, max_lr=None, num_steps=num_steps)
    for step in range(min(num_steps, 50)):
        expected = 0.5 * math.log(step + 1) / math.log(num_steps)
        assert curve.lr(step, 0.5) == pytest.approx(expected, rel=1e-15, abs=0)
    assert curve.lr(num_steps - 1, 0.5) == pytest.approx(0.5, rel=1e-15)
    assert curve.lr(num_steps, 0.5) == curve.lr(10**9, 0.5) == 0.5


def test_log_warmup_of_no_and_of_one_update() -> None:
    assert Warmup(num_steps=0).lr(0, 0.5) == 0.5
    assert [Warmup(num_steps=1).lr(step, 0.5) for step in (0, 1)] == [0.0, 0.5]


def test_decay() -> None:
    curve = WarmupDecay(
        warmup=Warmup(min_lr=0.1, max_lr=0.5, num_steps=4, shape="linear"), total_steps=12
    )
    expected = [0.1, 0.2, 0.3, 0.4] + [0.1 + 0.4 * (12 - step) / 8 for step in range(4, 12)]
    assert [curve.lr(step, 9.0) for step in range(12)] == pytest.approx(expected, rel=1e-15)
    assert curve.lr(12, 9.0) == curve.lr(100, 9.0) == 0.1
    alone = WarmupDecay(warmup=Warmup(max_lr=0.5, num_steps=4), total_steps=4)
    assert alone.lr(4, 9.0) == 0.0


def test_cosine() -> None:
    curve = WarmupCosine(
        total_steps=14, min_ratio=0.25, num_steps=4, cos_min_ratio=0.1, shape="linear"
    )
    expected = [0.25 + 0.75 * step / 4 for step in range(4)]
    expected += [
        0.1 + 0.9 * (1 + math.cos(math.pi * (step - 4 + 1) / 10)) / 2 for step in range(4, 14)
    ]
    assert [curve.lr(step, 2.0) for step in range(14)] == pytest.approx(
        [2.0 * ratio for ratio in expected], rel=1e-15
    )
    # The last update is at the minimum, and the cosine does not come back up.
    assert curve.lr(13, 2.0) == curve.lr(20, 2.0) == pytest.approx(0.2, rel=1e-15)
    assert WarmupCosine(total_steps=4, num_steps=4).lr(4, 2.0) == pytest.approx(2e-4)


@pytest.mark.parametrize("staircase", [False, True])
def test_range_test(staircase: bool) -> None:
    curve = RangeTest(min_lr=0.1, step_size=5, step_rate=2.0, staircase=staircase)
    for step in range(20):
        interval = math.floor(step / 5) if staircase else step / 5
        assert curve.lr(step, 9.0) == 0.1 * (1 + 2.0 * interval)
    assert RangeTest().lr(0, 0.3) == 0.3


def test_one_cycle() -> None:
    curve = OneCycle(
        min_lr=0.1,
        max_lr=0.5,
        up_steps=4,
        down_steps=8,
        decay_steps=2,
        lr_decay=0.5,
        momentum=(0.8, 0.9),
        momentum_decay=0.01,
    )
    heights = [step / 4 for step in range(5)] + [1 - step / 8 for step in range(1, 9)]
    for step, height in enumerate(heights):
        assert curve.lr(step, 9.0) == pytest.approx(0.1 + 0.4 * height, rel=1e-15)
        assert curve.beta1(step) == pytest.approx(0.9 - 0.1 * height, rel=1e-15)
    for after in (1, 2, 5):
        assert curve.lr(12 + after, 9.0) == pytest.approx(0.1 / (1 + 0.5 * after / 2), rel=1e-15)
        assert curve.beta1(12 + after) == pytest.approx(0.9 * (1 + 0.01 * after / 2), rel=1e-15)
    flat = OneCycle(min_lr=0.1, max_lr=0.5, up_steps=4, down_steps=8, momentum=None)
    assert flat.lr(1000, 9.0) == 0.1
    assert flat.beta1(3) is None


def test_one_cycle_stairs() -> None:
    curve = OneCycle(min_lr=0.0, max_lr=1.0, up_steps=8, down_steps=8, up_stairs=2, down_stairs=4)
    up = [0, 0, 0, 0, 0.5, 0.5, 0.5, 0.5, 1.0]
    down = [1.0, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25, 0.0]
    assert [curve.lr(step, 9.0) for step in range(17)] == up + down


@given(step=st.integers(0, 5000), warmup=st.integers(0, 2000), more=st.integers(0, 2000))
def test_rates_stay_between_their_ends(step: int, warmup: int, more: int) -> None:
    inner = Warmup(min_lr=1e-6, num_steps=warmup)
    total = max(1, warmup + more)
    for rate in (
        inner.lr(step, 1e-3),
        WarmupDecay(warmup=inner, total_steps=total).lr(step, 1e-3),
        WarmupCosine(total_steps=total, num_steps=warmup).lr(step, 1e-3),
    ):
        assert 0.0 <= rate <= 1e-3 * (1 + 1e-12)


_ALL: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 4}),
    ("WarmupDecayLR", {"warmup_num_steps": 4, "total_num_steps": 10, "warmup_max_lr": 0.5}),
    ("WarmupCosineLR", {"warmup_num_steps": 4, "total_num_steps": 10, "warmup_min_ratio": 0.1}),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4}),
    ("LRRangeTest", {"lr_range_test_step_size": 3}),
]


@pytest.mark.parametrize(("kind", "params"), _ALL)
def test_the_first_update_has_the_value_at_0(kind: str, params: dict[str, Any]) -> None:
    optimizer = _optimizer(0.3, 0.2)
    schedule = Schedule(optimizer, _spec(kind, **params))
    assert isinstance(schedule, LRScheduler)
    curves = schedule.curves
    expected = [
        [curve.lr(step, base) for curve, base in zip(curves, (0.3, 0.2), strict=True)]
        for step in range(12)
    ]
    assert schedule.get_last_lr() == expected[0]
    assert _rates(schedule, optimizer, 12) == expected


def test_rates_of_groups_are_the_users() -> None:
    optimizer = _optimizer(0.3, 0.2)
    schedule = Schedule(optimizer, _spec("WarmupLR", warmup_num_steps=0))
    assert schedule.get_last_lr() == [0.3, 0.2]
    each = _spec("WarmupLR", warmup_num_steps=0, warmup_max_lr=[0.5, 0.7])
    assert Schedule(_optimizer(0.3, 0.2), each).get_last_lr() == [0.5, 0.7]
    with pytest.raises(ConfigError, match=r"has 2 rates, and the optimizer 1 parameter groups"):
        Schedule(_optimizer(0.3), each)


def test_one_cycle_moves_beta1_and_leaves_beta2() -> None:
    optimizer = _optimizer(0.3)
    optimizer.param_groups[0]["betas"] = (0.5, 0.95)
    spec = _spec("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.5, cycle_first_step_size=2)
    schedule = Schedule(optimizer, spec)
    seen = [schedule.get_mom()[0]]
    for _ in range(4):
        _rates(schedule, optimizer, 1)
        seen.append(schedule.get_mom()[0])
    assert [beta2 for _, beta2 in seen] == [0.95] * 5
    assert [beta1 for beta1, _ in seen] == pytest.approx([0.9, 0.85, 0.8, 0.85, 0.9])


def test_momentum_needs_betas() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    params: dict[str, Any] = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5}
    with pytest.raises(ConfigError, match="SGD has no betas"):
        Schedule(optimizer, _spec("OneCycle", **params))
    Schedule(optimizer, _spec("OneCycle", cycle_momentum=False, **params))


def test_momentum_that_grows_to_1_is_an_error() -> None:
    params: dict[str, Any] = {"decay_step_size": 1, "decay_mom_rate": 0.2}
    spec = _spec("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.5, cycle_first_step_size=1, **params)
    optimizer = _optimizer(0.3)
    with pytest.raises(ConfigError, match=r"asks for beta1 1\.08 at update 3"):
        _rates(Schedule(optimizer, spec), optimizer, 5)


@pytest.mark.parametrize("done", [0, 1, 6])
@pytest.mark.parametrize(("kind", "params"), _ALL)
def test_state_is_plain_and_goes_on_where_it_was(
    kind: str, params: dict[str, Any], done: int
) -> None:
    whole_optimizer = _optimizer(0.3, 0.2)
    whole = _rates(Schedule(whole_optimizer, _spec(kind, **params)), whole_optimizer, 10)
    optimizer = _optimizer(0.3, 0.2)
    schedule = Schedule(optimizer, _spec(kind, **params))
    first = _rates(schedule, optimizer, done)
    state = json.loads(json.dumps(schedule.state_dict()))
    other = _optimizer(0.3, 0.2)
    other.load_state_dict(optimizer.state_dict())
    again = Schedule(other, _spec(kind, **params))
    again.load_state_dict(state)
    assert again.get_last_lr() == whole[done]
    assert first + _rates(again, other, 10 - done) == whole


def test_state_of_another_schedule() -> None:
    state = Schedule(_optimizer(0.3), _spec("WarmupLR")).state_dict()
    with pytest.raises(ConfigError, match="the saved schedule is WarmupLR"):
        Schedule(_optimizer(0.3), _spec("LRRangeTest")).load_state_dict(state)
