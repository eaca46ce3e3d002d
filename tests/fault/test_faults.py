"""A transfer or worker that fails: one exception, nothing readable after it, and no hang."""

from __future__ import annotations

import copy
import os
from dataclasses import replace

import pytest
import torch

from forebay import EngineClosedError, ForebayError, TransferError, native
from forebay.engine import EngineOptions, offload_with
from forebay.engine.options import Timing
from forebay.links import FaultScript
from forebay.plan import UpdatePlace
from unit.engine_cases import CPU, adamw, batches, loss_of, mlp, offloaded, run, weights

pytestmark = pytest.mark.timeout(60)

TEXT = "the disk is on fire"


def _script(**where) -> FaultScript:
    return FaultScript(seed=1, max_delay_us=200, fail_text=TEXT, **where)


STREAMED = replace(CPU, update=UpdatePlace.STREAMED)
# Pieces are counted over a run: two units, one piece each per step and direction.
FAULTS = {
    "first_landing": replace(CPU, fault=_script(fail_at=0)),
    "later_landing": replace(CPU, fault=_script(fail_at=3)),
    "first_arrival": replace(CPU, fault=_script(fail_up_at=0)),
    "later_arrival": replace(CPU, fault=_script(fail_up_at=3)),
    "synchronous": replace(CPU, fault=_script(fail_up_at=3), timing=Timing.SYNCHRONOUS),
    "fold": replace(CPU, backwards=2, fault=_script(fail_at=1)),
    "visit_up": replace(STREAMED, fault=_script(fail_up_at=2)),
    "visit_home": replace(STREAMED, fault=_script(fail_at=2)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("reader", ["training", "state_dict", "synchronize", "close"])
def test_one_error_then_closed(fault, reader):
    model = mlp()
    optimizer = offload_with(model, adamw(model), options=FAULTS[fault])[1]
    micro = FAULTS[fault].backwards or 1
    with pytest.raises(TransferError, match=TEXT) as caught:
        for number, x in enumerate(batches(20 * micro)):
            loss_of(model, x).backward()
            if number % micro == micro - 1:
                optimizer.step()
                if reader == "state_dict":
                    model.state_dict()
                elif reader == "synchronize":
                    optimizer.synchronize()
                elif reader == "close" and number > 4 * micro:
                    optimizer.close()
                optimizer.zero_grad()
    assert "checkpoint" in str(caught.value) or reader != "training"
    if reader != "close":
        _assert_closed(model, optimizer)
        optimizer.close()
    optimizer.close()
    _assert_given_back(model)


def _assert_closed(model, optimizer):
    """Nothing that was or depends on state may be read."""
    readers = [
        model.state_dict,
        model[0].state_dict,
        optimizer.state_dict,
        lambda: optimizer.state,
        optimizer.step,
        optimizer.zero_grad,
        optimizer.synchronize,
        optimizer.refresh,
        lambda: model(batches(1)[0]),
        lambda: copy.deepcopy(model),
        lambda: model.load_state_dict(mlp().state_dict()),
    ]
    for read in readers:
        with pytest.raises(EngineClosedError, match=TEXT):
            read()
    assert all(p.isnan().all() for p in model.parameters())


def _assert_given_back(model):
    """The model is an ordinary one again, full of NaN, into which a checkpoint loads."""
    assert all(value.isnan().all() for value in weights(model).values())
    model.load_state_dict(mlp().state_dict())
    with offloaded(model) as optimizer:
        assert torch.isfinite(torch.tensor(run(model, optimizer))).all()


def test_gradient_that_failed_to_land_cannot_be_read():
    model = mlp()
    optimizer = offload_with(model, adamw(model), options=FAULTS["first_landing"])[1]
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(TransferError, match=TEXT):  # of one of the two units
        for param in model.parameters():
            param.grad.norm()
    with pytest.raises(TransferError, match=TEXT):
        optimizer.step()
        optimizer.synchronize()
    _assert_closed(model, optimizer)
    optimizer.close()


@pytest.mark.parametrize("part", ["pool", "down", "up"])
@pytest.mark.parametrize("options", ["host", "streamed", "sums"])
def test_lane_closed_underneath(options, part):
    chosen = {"host": CPU, "streamed": STREAMED, "sums": replace(CPU, backwards=2)}[options]
    model = mlp()
    optimizer = offload_with(model, adamw(model), options=chosen)[1]
    run(model, optimizer, steps=1, micro=chosen.backwards or 1)
    optimizer.synchronize()
    getattr(optimizer.engine.lanes, part).close()
    with pytest.raises((ForebayError, RuntimeError)) as caught:
        for x in batches(4):
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
    assert "closed" in str(caught.value)
    try:
        optimizer.close()
    except TransferError as error:
        assert "closed" in str(error)
    optimizer.close()


def test_errors_of_others_do_not_close_the_engine():
    model = mlp()
    with offloaded(model) as optimizer:
        run(model, optimizer, steps=1)
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 9))
        run(model, optimizer, steps=1)


def test_interrupt_while_step_waits():
    """Ctrl-C inside step()'s wait for the norm: the window is void, the engine is not."""
    model = mlp()
    with offloaded(model) as optimizer:
        run(model, optimizer, steps=1)
        before = weights(model)
        loss_of(model, batches(1)[0]).backward()
        math = optimizer.engine._executor.math

        def _interrupted():
            raise KeyboardInterrupt

        math.read, read = _interrupted, math.read
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        math.read = read
        assert all(torch.equal(before[n], v) for n, v in weights(model).items())
        with pytest.raises(ForebayError, match="KeyboardInterrupt"):
            optimizer.step()
        optimizer.zero_grad()
        run(model, optimizer, steps=1)


def test_interrupt_between_the_updates_of_units_closes():
    """Some units are new and some old: no weight may be used any more."""
    model = mlp()
    optimizer = offload_with(model, adamw(model), options=CPU)[1]
    loss_of(model, batches(1)[0]).backward()
    executor = optimizer.engine._executor
    update = executor._update_on_host

    def _once(unit):
        if unit.index:
            raise KeyboardInterrupt
        update(unit)

    executor._update_on_host = _once
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    with pytest.raises(EngineClosedError, match="KeyboardInterrupt"):
        model.state_dict()
    assert all(p.isnan().all() for p in model.parameters())
    optimizer.close()


def test_no_permission_to_bind_threads(monkeypatch):
    """Affinity is a wish: where the system refuses to tell or to set it, training goes on."""

    def _refuse(*_args):
        raise PermissionError("EPERM")

    monkeypatch.setattr(os, "sched_getaffinity", _refuse)
    model = mlp()
    with offloaded(model, EngineOptions(device="cpu")) as optimizer:
        run(model, optimizer, steps=2)
        assert optimizer.engine.cores.threads >= 1


def test_forbidden_processors():
    """Cores that do not exist cannot be bound to; the pool says so and works."""
    pool = native.core().Pool(1, [4095])
    assert pool.pinning_error
    pool.close()
