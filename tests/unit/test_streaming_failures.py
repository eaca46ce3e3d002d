"""Weights that live on the host when something fails: a forward, the link, the device's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import forebay
from forebay.engine import offload_with
from forebay.errors import (
    ConfigError,
    EngineClosedError,
    TransferError,
    UnsupportedError,
)
from forebay.links import FaultScript
from unit.engine_cases import adamw, loss_of, offloaded, run, same, weights
from unit.streaming_cases import AWAY, BLOCK, RESIDENT, deep, inputs, no_hooks_are_left, step


def test_a_forward_that_raises_leaves_nothing_held():
    model, twin = deep(), deep()
    with offloaded(model, AWAY) as optimizer, offloaded(twin, RESIDENT) as other:
        for error in (ValueError, KeyboardInterrupt):

            def _fail(*_args, error=error):
                raise error

            handle = model[6].register_forward_pre_hook(_fail)
            with pytest.raises(error):
                model(inputs(1)[0])
            handle.remove()
        for x in inputs(3):
            assert step(model, optimizer, x) == step(twin, other, x)
        pool = optimizer.engine.streaming.residency.pool
        assert not pool._held
        assert no_hooks_are_left()


def test_a_device_without_memory_is_an_error_and_nothing_is_lost():
    model, twin = deep(), deep()
    with offloaded(model, AWAY) as optimizer, offloaded(twin, RESIDENT) as other:
        homes = [part.home for unit in optimizer.engine.units for part in unit.parts]
        for turn, x in enumerate(inputs(5)):
            fill = homes[turn].fill

            def _out_of_memory():
                raise torch.OutOfMemoryError

            homes[turn].fill = _out_of_memory
            with pytest.raises(torch.OutOfMemoryError):
                loss_of(model, x).backward()
                optimizer.engine.streaming.residency.drop_all()
                model(x)
            homes[turn].fill = fill
            optimizer.zero_grad()
            assert step(model, optimizer, x) == step(twin, other, x)
        assert same(weights(model), weights(twin))


def test_where_activations_leave_less_room_than_the_pool_has_less_comes_ahead():
    model, twin = deep(), deep()
    with (
        offloaded(model, replace(AWAY, pool_bytes=6 * BLOCK)) as optimizer,
        offloaded(twin, RESIDENT) as other,
    ):
        parts = [part for unit in optimizer.engine.units for part in unit.parts]

        def _room_for_two(fill):
            def _fill():
                there = sum(part.home.storages[0].nbytes() > 0 for part in parts)
                if there >= 2:
                    raise torch.OutOfMemoryError
                fill()

            return _fill

        for part in parts:
            part.home.fill = _room_for_two(part.home.fill)
        for x in inputs(5):
            assert step(model, optimizer, x) == step(twin, other, x)
        assert same(weights(model), weights(twin))


@pytest.mark.parametrize("piece", [0, 7, 30])
def test_a_load_that_fails_closes_the_engine(piece):
    model = deep()
    options = replace(AWAY, fault=FaultScript(seed=0, fail_load_at=piece))
    _, optimizer = offload_with(model, adamw(model), options=options)
    with pytest.raises(TransferError, match="scripted failure"):
        run(model, optimizer, steps=9, features=12)
    with pytest.raises(EngineClosedError):
        model.state_dict()
    with pytest.raises(EngineClosedError):
        model(inputs(1)[0])
    optimizer.close()
    assert all(bool(param.isnan().all()) for param in model.parameters())


def test_where_weights_live_is_one_of_two():
    model = deep()
    with pytest.raises(ConfigError, match="parameters is 'elsewhere'"):
        forebay.offload(model, adamw(model), parameters="elsewhere")
    model, optimizer = forebay.offload(
        model, adamw(model), device="cpu", parameters="host", device_budget=3 * BLOCK
    )
    assert all(unit.streams_weights for unit in optimizer.engine.units)
    run(model, optimizer, features=12)
    optimizer.close()


def test_what_is_compiled_too_late_is_refused():
    model = deep()
    with offloaded(model, AWAY):
        model[0].compile(backend="eager")
        with pytest.raises(UnsupportedError, match=r"compiled after .*\n.*blocks before"):
            model(inputs(1)[0])
