"""All or nothing: an overflow changes no bit; loss scales, and the check turned off."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import forebay
from forebay import GradientError
from forebay.engine.options import OverflowCheck
from forebay.optim.loss_scale import DynamicLossScale, LossScaleConfig, StaticLossScale
from unit.engine_cases import (
    CPU,
    PLACES,
    adamw,
    batches,
    close,
    loss_of,
    masters,
    mlp,
    offloaded,
    run,
    same,
    weights,
)


def _everything(model, optimizer) -> list[torch.Tensor]:
    """Copies of weights, masters, moments and step counts."""
    state = [
        value.clone()
        for entry in optimizer.state_dict()["state"].values()
        for value in entry.values()
    ]
    return [*weights(model).values(), *masters(optimizer), *state]


def _equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("micro", [1, 2])
def test_skip_changes_no_bit_and_names_the_parameter(micro, place, bad, caplog):
    model = mlp(torch.bfloat16)
    with offloaded(model, PLACES[place]) as optimizer:
        run(model, optimizer, steps=2, micro=micro)
        before = _everything(model, optimizer)
        for x in batches(micro, torch.bfloat16):
            loss_of(model, x).backward()
        poisoned = torch.ones_like(model[2].weight)
        poisoned[1, 2] = bad
        model[2].weight.grad = poisoned
        with caplog.at_level(logging.WARNING, logger="forebay"):
            optimizer.step()
        assert "2.weight is not finite" in caplog.text
        assert optimizer.engine.last_outcome.bad_parameter == "2.weight"
        assert not optimizer.engine.last_outcome.applied
        assert optimizer.engine.skipped_steps == 1
        assert not math.isfinite(optimizer.last_grad_norm)
        assert _equal(before, _everything(model, optimizer))
        optimizer.zero_grad()
        run(model, optimizer, steps=1, micro=micro)
        assert not _equal(before, _everything(model, optimizer))


@pytest.mark.parametrize("place", ["host", "resident", "streamed"])
def test_a_skipped_step_is_as_if_it_had_not_been(place):
    def _train(with_a_bad_one):
        model = mlp(torch.bfloat16)
        with offloaded(model, PLACES[place]) as optimizer:
            for number, x in enumerate(batches(4, torch.bfloat16)):
                if number == 2 and with_a_bad_one:
                    (loss_of(model, x) * float("inf")).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
                optimizer.zero_grad()
            return _everything(model, optimizer)

    assert _equal(_train(with_a_bad_one=True), _train(with_a_bad_one=False))


def test_check_turned_off():
    model = mlp(torch.bfloat16)
    with offloaded(model, replace(CPU, overflow=OverflowCheck.OFF)) as optimizer:
        (loss_of(model, batches(1, torch.bfloat16)[0]) * float("nan")).backward()
        optimizer.step()
        assert optimizer.engine.last_outcome.applied
        assert weights(model)["0.weight"].isnan().all()


def test_check_turned_off_by_the_configuration():
    model = mlp()
    config = {
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine, *_ = forebay.initialize(model=model, config=config)
    with engine:
        engine.backward(loss_of(engine, batches(1, torch.bfloat16)[0]) * float("inf"))
        engine.step()
        assert engine.was_step_applied()


def _scaled_run(model, optimizer, steps):
    values = []
    for x in batches(steps, torch.float16):
        optimizer.scale(loss_of(model, x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(optimizer.engine.options.loss_scale.value)
    return values


def test_dynamic_scale_falls_until_gradients_fit():
    model = mlp(torch.float16)
    scale = DynamicLossScale(LossScaleConfig(initial_scale_power=24, hysteresis=1))
    with offloaded(model, replace(CPU, loss_scale=scale)) as optimizer:
        values = _scaled_run(model, optimizer, 16)
        skipped = optimizer.engine.skipped_steps
        assert 0 < skipped < 16
        assert values[-1] == 2.0 ** (24 - skipped)
        assert optimizer.state[model[0].weight]["step"] == 16 - skipped


def test_dynamic_scale_grows_after_quiet_windows():
    model = mlp(torch.float16)
    scale = DynamicLossScale(LossScaleConfig(initial_scale_power=4, loss_scale_window=2))
    with offloaded(model, replace(CPU, loss_scale=scale)) as optimizer:
        values = _scaled_run(model, optimizer, 6)
        assert values[0] < values[-1] == 2.0**7


@pytest.mark.parametrize("power", [0, 3, 10])
def test_static_scale_changes_no_bit(power):
    expected = mlp(torch.float16)
    with offloaded(expected, replace(CPU, loss_scale=StaticLossScale())) as optimizer:
        _scaled_run(expected, optimizer, 4)
        wanted = masters(optimizer)
    model = mlp(torch.float16)
    options = replace(CPU, loss_scale=StaticLossScale(2.0**power))
    with offloaded(model, options) as optimizer:
        _scaled_run(model, optimizer, 4)
        # gradients below fp16's normal range keep more bits when scaled
        found = masters(optimizer)
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(wanted, found, strict=True))


def test_overflow_at_the_smallest_scale_is_an_error_after_a_clean_skip():
    model = mlp(torch.float16)
    scale = DynamicLossScale(
        LossScaleConfig(initial_scale_power=1, hysteresis=1, min_loss_scale=2.0)
    )
    with offloaded(model, replace(CPU, loss_scale=scale)) as optimizer:
        before = _everything(model, optimizer)
        optimizer.scale(loss_of(model, batches(1, torch.float16)[0]) * float("inf")).backward()
        with pytest.raises(GradientError, match="smallest loss scale"):
            optimizer.step()
        assert optimizer.engine.skipped_steps == 1
        optimizer.zero_grad()
        assert _equal(before, _everything(model, optimizer))
        _scaled_run(model, optimizer, 1)


def test_unscaled_loss_in_fp16_is_an_error():
    """offload() gives fp16 models a loss scale; loss.backward() would train far too slowly."""
    model = mlp(torch.float16)
    model, optimizer = forebay.offload(model, adamw(model), device="cpu")
    x = batches(1, torch.float16)[0]
    loss_of(model, x).backward()
    with pytest.raises(GradientError, match=r"optimizer\.scale\(loss\)"):
        optimizer.step()
    optimizer.zero_grad()
    scaled = optimizer.scale(loss_of(model, x))
    optimizer.zero_grad()  # a usual place for it
    scaled.backward()
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("place", ["host", "resident", "streamed"])
def test_masters_move_below_the_spacing_of_bf16(place):
    """Two thousand updates of 1e-6, each far below bf16's spacing at 1: none is lost."""
    settings = {"lr": 1e-6, "weight_decay": 0.0}

    def _loop(weight, optimizer):
        for _ in range(2000):
            weight.grad = torch.ones(3, dtype=weight.dtype)
            optimizer.step()
            optimizer.zero_grad()

    plain = nn.Parameter(torch.ones(3))
    _loop(plain, torch.optim.AdamW([plain], **settings))
    model = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])
    source = torch.optim.AdamW(model.parameters(), **settings)
    with offloaded(model, PLACES[place], source) as optimizer:
        _loop(model[0], optimizer)
        moved, expected = 1 - masters(optimizer)[0], (1 - plain).detach()
        assert torch.allclose(moved, expected, rtol=1e-3, atol=0.0)
        assert not torch.equal(model[0].detach(), torch.ones(3, dtype=torch.bfloat16))


def test_clipping_is_the_norm_of_torch():
    plain, model = mlp(), mlp()
    reference = adamw(plain)
    with offloaded(model, replace(CPU, clip_norm=0.1)) as optimizer:
        for x in batches(4):
            loss_of(plain, x).backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            reference.step()
            reference.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.last_grad_norm == pytest.approx(norm.item(), rel=1e-5)
        optimizer.synchronize()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_same_bits_for_the_same_run():
    results = []
    for _ in range(2):
        model = mlp()
        with offloaded(model) as optimizer:
            run(model, optimizer, micro=2)
            results.append(weights(model))
    assert same(*results)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("declared", [None, 2])
def test_zeroed_after_departure(place, declared):
    """`model.zero_grad(set_to_none=False)` after backward: norm 0, decay alone moves weights."""

    def _loop(model, optimizer):
        run(model, optimizer, steps=1, micro=declared or 1)
        loss_of(model, batches(1)[0]).backward()
        model.zero_grad(set_to_none=False)
        optimizer.step()
        optimizer.zero_grad()

    plain, model = mlp(), mlp()
    _loop(plain, adamw(plain))
    options = replace(PLACES[place], backwards=declared, clip_norm=1e3)
    with offloaded(model, options) as optimizer:
        _loop(model, optimizer)
        assert optimizer.last_grad_norm == 0.0
        assert close(weights(model), weights(plain))
