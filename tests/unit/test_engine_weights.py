"""Weights that the user changes survive, whichever way and wherever their state lives."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

from forebay import PendingWeightError, UnsupportedError
from forebay.links import FaultScript
from forebay.plan import UpdatePlace
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

# Every copy is late: whoever does not wait sees it.
LATE = replace(CPU, fault=FaultScript(seed=0, max_delay_us=20_000))
# Weights live on the host, and state visits the device.
ALL_AWAY = replace(PLACES["weights_away"], update=UpdatePlace.STREAMED)


def _step(model, optimizer, number: int = 0):
    loss_of(model, batches(number + 1, next(model.parameters()).dtype)[number]).backward()
    optimizer.step()
    optimizer.zero_grad()


def _new(model) -> torch.Tensor:
    return torch.linspace(-1, 1, model[0].weight.numel()).reshape(model[0].weight.shape)


def _copy(model, optimizer):
    with torch.no_grad():
        model[0].weight.copy_(_new(model))


def _load(model, optimizer):
    model.load_state_dict({**model.state_dict(), "0.weight": _new(model)})


def _assign(model, optimizer):
    model[0].weight.data = _new(model).to(model[0].weight.dtype)


def _through_data(model, optimizer):
    model[0].weight.data.copy_(_new(model))
    if optimizer is not None:
        optimizer.refresh([model[0].weight])


def _in_place(model, optimizer):
    with torch.no_grad():
        model[0].weight.mul_(0.5)


CHANGES = {
    "copy_": _copy,
    "load_state_dict": _load,
    "data_assigned": _assign,
    "through_data": _through_data,
    "in_place": _in_place,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", PLACES)
def test_changed_weights_become_the_masters(place, change):
    def _loop(model, optimizer, ours):
        run(model, optimizer, steps=2)
        if ours:
            optimizer.synchronize()
        CHANGES[change](model, optimizer if ours else None)
        run(model, optimizer, steps=2)

    plain, model = mlp(), mlp()
    _loop(plain, adamw(plain), ours=False)
    with offloaded(model, PLACES[place]) as optimizer:
        _loop(model, optimizer, ours=True)
        assert close(weights(model), weights(plain))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", ["resident", "streamed", "whole", "resident_whole"])
def test_changed_weights_in_every_place(place, change):
    def _train(options):
        model = mlp(torch.bfloat16)
        with offloaded(model, options) as optimizer:
            for number in range(4):
                _step(model, optimizer, number)
                optimizer.synchronize()
                if number == 1:
                    CHANGES[change](model, optimizer)
            return masters(optimizer)

    expected, found = _train(CPU), _train(PLACES[place])
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    "options",
    [PLACES["resident"], PLACES["streamed"], PLACES["weights_away"], ALL_AWAY],
    ids=["resident", "streamed", "weights_away", "all_away"],
)
def test_weights_changed_between_backward_and_step(options):
    """State that is on its way to the device for the update is older than the change."""

    def _train(chosen):
        model = mlp(torch.bfloat16)
        with offloaded(model, chosen) as optimizer:
            for number in range(4):
                loss_of(model, batches(5, torch.bfloat16)[number]).backward()
                if number == 2:
                    _copy(model, optimizer)
                if number == 3:
                    model.state_dict()  # a reader in the middle of a window changes nothing
                optimizer.step()
                optimizer.zero_grad()
            return masters(optimizer)

    expected, found = _train(CPU), _train(options)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_refresh_of_chosen_weights_leaves_other_masters():
    model = mlp(torch.bfloat16)
    with offloaded(model) as optimizer:
        run(model, optimizer, steps=2)
        before = masters(optimizer)
        model[0].weight.data.zero_()
        optimizer.refresh([model[0].weight])
        after = masters(optimizer)
        assert not after[0].any()
        assert all(torch.equal(a, b) for a, b in zip(before[1:], after[1:], strict=True))
        optimizer.refresh()
        assert torch.equal(masters(optimizer)[1], model[0].bias.detach().float())


@pytest.mark.parametrize("options", [PLACES["weights_away"], ALL_AWAY], ids=["host", "visits"])
def test_refresh_of_all_weights_wherever_they_are(options):
    """Masters are those of resident weights; what is not on the device stays trainable."""

    def _train(chosen):
        model = mlp(torch.bfloat16)
        with offloaded(model, chosen) as optimizer:
            _step(model, optimizer)
            optimizer.refresh()
            _step(model, optimizer, 1)
            return masters(optimizer)

    expected, found = _train(CPU), _train(options)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("place", ["host", "weights_away"])
def test_what_is_made_of_weights_that_are_not_there_is_refused_and_nothing_is_lost(place):
    """As `model.half()` right after `step()`; it would be NaN for ever."""
    model, twin, x = mlp(), mlp(), batches(1)[0]
    with offloaded(model, PLACES[place]) as optimizer, offloaded(twin) as other:
        _step(model, optimizer)
        for param in model.parameters():
            param.data = param.data.clone()
        with pytest.raises(PendingWeightError, match="was assigned NaN"):
            model(x)
        for _ in model.parameters():
            with contextlib.suppress(PendingWeightError):
                model(x)
        _step(model, optimizer, 1)
        run(twin, other, steps=2)
        assert same(weights(model), weights(twin))


def test_assigned_while_pending_stays():
    """`p.data = x` right after step(): the arriving weight must not undo it."""

    def _loop(model, optimizer):
        for number in range(3):
            _step(model, optimizer, number)
            model[0].weight.data = _new(model) * (number + 1)

    plain, model = mlp(), mlp()
    _loop(plain, adamw(plain))
    with offloaded(model, LATE) as optimizer:
        _loop(model, optimizer)
        assert close(weights(model), weights(plain))


def test_evaluation_between_steps():
    def _loop(model, optimizer):
        values = []
        for index, x in enumerate(batches(4)):
            run_mode = [torch.no_grad, torch.inference_mode, torch.enable_grad][index % 3]
            model.eval()
            with run_mode():
                values.append(loss_of(model, x).item())
            model.train()
            loss_of(model, x).backward()
            with run_mode():
                values.append(loss_of(model, x).item())  # between backward and step
            optimizer.step()
            optimizer.zero_grad()
        return values

    plain, model = mlp(), mlp()
    expected = _loop(plain, adamw(plain))
    with offloaded(model, LATE) as optimizer:
        assert _loop(model, optimizer) == pytest.approx(expected, rel=1e-5)
        assert close(weights(model), weights(plain))


def test_parameters_must_stay_the_same_objects():
    model = mlp()
    with offloaded(model), pytest.raises(UnsupportedError, match="assign"):
        model.load_state_dict(mlp().state_dict(), assign=True)


def test_closed_models_are_ordinary():
    model = mlp()
    with offloaded(model) as optimizer:
        _step(model, optimizer)
    assert torch.isfinite(model(batches(1)[0])).all()
    plain = adamw(model)
    run(model, plain)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not model[0]._forward_pre_hooks
    assert not model._state_dict_pre_hooks
