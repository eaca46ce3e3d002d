"""A weight that is read around its module while it is away is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import PendingWeightError
from unit.engine_cases import loss_of, offloaded
from unit.streaming_cases import AWAY, BLOCK, deep, inputs, step

# Room for two of six: the one that is read again has gone by then.
FEW = replace(AWAY, pool_bytes=2 * BLOCK)


class _Borrowing(nn.Module):
    """Reads a weight of a block from a list, after all blocks or after those of `late` forwards."""

    def __init__(self, use, *, late: int = 0) -> None:
        super().__init__()
        self.inner = deep()
        self.borrowed = [self.inner[2].weight]
        self.use, self.late = use, late

    def forward(self, x):
        y = self.inner(x)
        self.late -= 1
        return y if self.late >= 0 else self.use(y, self.borrowed[0])


def _whole(y, w):
    return y @ w


def _slice(y, w):
    return torch.nn.functional.linear(y, w[:5])


def _unsaved(y, w):
    return y + w.sum()


@pytest.mark.parametrize("use", [_whole, _slice, _unsaved])
def test_a_weight_in_a_list_is_refused_by_name_in_the_forward(use):
    model = _Borrowing(use)
    with offloaded(model, FEW):
        with pytest.raises(PendingWeightError, match=r"inner\.2\.weight was read") as caught:
            model(inputs(1)[0])
        assert "register_external_parameter" in caught.value.hint


@pytest.mark.parametrize("use", [_whole, _slice])
def test_a_frozen_weight_in_a_list_is_too(use):
    model = _Borrowing(use)
    for block in model.inner[:10]:
        block.requires_grad_(requires_grad=False)
    refused = pytest.raises(PendingWeightError, match=r"inner\.2\.weight was read")
    with offloaded(model, FEW), refused:
        model(inputs(1)[0])


def test_a_read_that_comes_later_is_named_after_one_skipped_step():
    model = _Borrowing(_unsaved, late=3)
    with offloaded(model, FEW) as optimizer:
        for x in inputs(4):
            step(model, optimizer, x)
        assert optimizer.engine.skipped_steps == 1
        with pytest.raises(PendingWeightError, match=r"inner\.2\.weight was read"):
            model(inputs(1)[0])


def test_after_the_refusal_a_model_that_declares_the_read_trains():
    model = _Borrowing(_whole)
    with offloaded(model, FEW) as optimizer:
        with pytest.raises(PendingWeightError):
            model(inputs(1)[0])
        forebay.zero.register_external_parameter(model, model.borrowed[0])
        step(model, optimizer, inputs(1)[0])
        assert optimizer.engine.last_outcome.applied


def test_a_weight_kept_on_ctx_is_among_the_causes_that_are_named(caplog):
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, w):
            ctx.w = w
            return y @ w

        @staticmethod
        def backward(ctx, grad):
            return grad @ ctx.w.t(), None

    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = deep()

        def forward(self, x):
            return self.inner[1:](Kept.apply(self.inner[0](x), self.inner[0].weight))

    model = Reading()
    with offloaded(model, FEW) as optimizer:
        loss_of(model, inputs(1)[0]).backward()
        optimizer.step()
    assert not optimizer.engine.last_outcome.applied
    assert "ctx.save_for_backward" in caplog.text
