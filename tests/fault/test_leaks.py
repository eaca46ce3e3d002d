"""Memory over time: steps, discarded windows and engines that come and go leave nothing behind."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import psutil
import pytest
import torch
from torch import nn

from forebay.engine import offload_with
from forebay.plan import WeightPlace
from forebay.tiers.ledger import Tier
from unit.engine_cases import CPU, PLACES, adamw, offloaded

MIB = 1 << 20


def _resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def _model() -> nn.Sequential:
    """A quarter of a million parameters: 4 MB of state."""
    return nn.Sequential(nn.Linear(500, 250), nn.ReLU(), nn.Linear(250, 500)).bfloat16()


def _step(model, optimizer, micro=1):
    for _ in range(micro):
        model(torch.ones(1, 500, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("place", ["host", "streamed"])
@pytest.mark.parametrize("micro", [1, 2])
def test_steps_leave_nothing(micro, place):
    model = _model()
    steps = 300 if place == "host" and micro == 1 else 30
    with offloaded(model, replace(PLACES[place], backwards=micro)) as optimizer:
        for _ in range(10):
            _step(model, optimizer, micro)
        rows, grown = optimizer.engine.ledger.table(), []
        for _ in range(3):  # what steps leave they leave in every round; the heap grows in one
            before = _resident()
            for _ in range(steps):
                _step(model, optimizer, micro)
            optimizer.synchronize()
            grown.append(_resident() - before)
            if grown[-1] < 3 * MIB:
                break
        assert min(grown) < 3 * MIB, grown
        assert {r[:2]: r.nbytes for r in optimizer.engine.ledger.table()} == {
            r[:2]: r.nbytes for r in rows
        } or place == "streamed"
        optimizer.engine.ledger.check()


def test_discarded_windows_leave_nothing():
    model = _model()
    with offloaded(model) as optimizer:
        _step(model, optimizer)
        before = _resident()
        for _ in range(40):  # each gradient is half a MB
            model(torch.ones(1, 500, dtype=torch.bfloat16)).sum().backward()
            optimizer.zero_grad()
        assert _resident() - before < 4 * MIB


@pytest.mark.parametrize("ending", ["closed", "dropped", "dropped_in_a_window"])
def test_engines_come_and_go(ending):
    """4 MB each; five of them must not add up."""

    def _one():
        model = _model()
        optimizer = offload_with(model, adamw(model), options=CPU)[1]
        _step(model, optimizer)
        if ending == "closed":
            optimizer.close()
        elif ending == "dropped_in_a_window":
            model(torch.ones(1, 500, dtype=torch.bfloat16)).sum().backward()
        return optimizer.engine.ledger

    for _ in range(3):
        _one()
    before = _resident()
    ledgers = [_one() for _ in range(5)]
    assert _resident() - before < 6 * MIB
    assert all(ledger.bytes(Tier.HOST) == 0 for ledger in ledgers)
    assert all(ledger.bytes(Tier.DEVICE) == 0 for ledger in ledgers)


def test_one_model_through_many_engines():
    model = _model()
    with offloaded(model) as optimizer:
        _step(model, optimizer)
    before = _resident()
    for _ in range(5):
        with offloaded(model) as optimizer:
            _step(model, optimizer)
    assert _resident() - before < 6 * MIB


def test_outputs_that_are_leaves_collect_no_hooks():
    """A model that returns its input or a parameter: hooks must not pile up on them."""

    class Echo(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.weight, self.weight, x

    model = Echo()
    x = torch.ones(3, requires_grad=True)
    with offloaded(model) as optimizer:
        for _ in range(20):
            model(x)[0].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not model.weight._backward_hooks
        assert not x._backward_hooks


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("on purpose")


def test_an_engine_dropped_after_a_backward_that_failed_between_streamed_weights_goes():
    """Its files go with it: a node of autograd that somebody kept would keep both."""

    def _one():
        model = _model()
        options = replace(CPU, weights=WeightPlace.HOST)
        optimizer = offload_with(model, adamw(model), options=options)[1]
        first, middle, last = model
        loss = last(_Failing.apply(middle(first(torch.ones(1, 500, dtype=torch.bfloat16))))).sum()
        with pytest.raises(ValueError, match="on purpose"):
            loss.backward()
        return weakref.ref(optimizer.engine)

    gone = _one()
    gc.collect()
    assert gone() is None
