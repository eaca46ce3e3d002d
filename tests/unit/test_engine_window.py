"""The window: how many backwards, which of them count, and what a failed one does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import forebay
from forebay import GradientError
from forebay.engine.options import SumPlace
from forebay.plan import Accumulation
from unit.engine_cases import (
    CPU,
    PLACES,
    adamw,
    batches,
    check_as_plain,
    close,
    loss_of,
    mlp,
    offloaded,
    run,
    same,
    trained_as_plain,
    weights,
)

HOST_CONFIG = {
    "gradient_clipping": 0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
}


def _initialize(model: nn.Module, **config):
    engine, *_ = forebay.initialize(model=model, config={**HOST_CONFIG, **config})
    return engine


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("micro", [2, 3])
def test_learned_windows(place, micro):
    plain, model = mlp(), mlp()
    losses = run(plain, adamw(plain), micro=micro)
    with offloaded(model, PLACES[place]) as optimizer:
        assert run(model, optimizer, micro=micro) == pytest.approx(losses, rel=1e-5)
        assert close(weights(model), weights(plain))
        assert optimizer.engine.placement.backwards_per_update == micro
        assert optimizer.engine.placement.accumulation is Accumulation.HOST_SUM


@pytest.mark.parametrize("sums", list(SumPlace))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_windows_of_unequal_length(dtype, sums):
    """Four backwards are declared; windows have 4, 1, 2, 6 and 4 of them."""

    def _loop(model, optimizer):
        xs = iter(batches(17, dtype))
        for length in (4, 1, 2, 6, 4):
            for _ in range(length):
                loss_of(model, next(xs)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    results = []
    for options in (
        replace(CPU, backwards=4, sum_place=sums),
        PLACES["resident"],
        CPU,
        replace(PLACES["streamed"], backwards=4, sum_place=sums),
    ):
        model = mlp(dtype)
        with offloaded(model, options) as optimizer:
            results.append(_loop(model, optimizer))
    assert all(same(results[0], other) for other in results[1:])
    if dtype is torch.float32:
        plain = mlp()
        assert close(results[0], _loop(plain, adamw(plain)))


def test_partial_window_is_flushed_with_its_true_count():
    """Ten micro-batches in windows of four: the last update is the mean of two."""
    plain = mlp()
    reference = adamw(plain)
    xs = batches(10)
    for start, length in ((0, 4), (4, 4), (8, 2)):
        for x in xs[start : start + length]:
            (loss_of(plain, x) / length).backward()
        reference.step()
        reference.zero_grad()
    model = mlp()
    with _initialize(
        model, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=4
    ) as engine:
        for x in xs:
            engine.backward(loss_of(engine, x))
            engine.step()
        assert (engine.global_steps, engine.micro_steps) == (2, 10)
        engine.flush()
        engine.flush()  # nothing is left
        assert engine.global_steps == 3
        assert close(weights(model), weights(plain))


def test_unused_window_is_discarded():
    def _loop(model, optimizer):
        xs = batches(4)
        loss_of(model, xs[0]).backward()
        optimizer.zero_grad()
        for x in xs[1:]:
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()

    check_as_plain(_loop)


@pytest.mark.parametrize("place", ["host", "resident", "streamed"])
@pytest.mark.parametrize("way", ["optimizer", "model", "none", "zeros"])
def test_ways_to_clear(way, place):
    def _loop(model, optimizer):
        for x in batches(4):
            if way == "optimizer":
                optimizer.zero_grad()
            elif way == "model":
                model.zero_grad()
            elif way == "zeros":
                optimizer.zero_grad(set_to_none=False)
            else:
                for p in model.parameters():
                    p.grad = None
            loss_of(model, x).backward()
            optimizer.step()

    check_as_plain(_loop, PLACES[place])


def test_zeroed_gradients_are_present():
    """Decay and moments go on where a gradient is 0, as in torch; absent ones are skipped."""

    def _loop(model, optimizer):
        run(model, optimizer, steps=1)
        loss_of(model, batches(1)[0]).backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        assert optimizer.state[model[0].weight]["step"] == 2

    check_as_plain(_loop)


def test_step_without_backward_changes_nothing():
    model = mlp()
    with offloaded(model) as optimizer:
        before = weights(model)
        optimizer.step()
        assert same(before, weights(model))
        assert optimizer.state[model[0].weight]["step"] == 0


def test_step_twice_and_forgotten_zero_grad():
    model = mlp()
    with offloaded(model) as optimizer:
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
        before = weights(model)
        with pytest.raises(GradientError, match="zero_grad"):
            optimizer.step()
        with pytest.raises(GradientError, match="zero_grad"):
            loss_of(model, batches(1)[0]).backward()
        assert same(before, weights(model))
        optimizer.zero_grad()
        run(model, optimizer, steps=1)


def test_two_losses_and_retained_graphs():
    def _loop(model, optimizer):
        for x in batches(3):
            out = model(x)
            (out.pow(2).mean()).backward(retain_graph=True)
            (out.abs().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    check_as_plain(_loop)


@pytest.mark.parametrize("place", ["host", "resident", "streamed"])
def test_graph_of_before_the_step_fails_as_in_torch(place):
    model = mlp()
    with offloaded(model, PLACES[place]) as optimizer:
        x = batches(1)[0].requires_grad_()
        loss = loss_of(model, x)
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
            torch.autograd.grad(loss, x)


def test_gradients_of_inputs_alone_are_no_backward():
    def _loop(model, optimizer):
        for x in batches(3):
            leaf = x.requires_grad_()
            out = model(leaf)
            torch.autograd.grad(out.sum(), leaf, retain_graph=True)
            out.pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with trained_as_plain(_loop) as (_, optimizer):
        assert optimizer.engine.placement.accumulation is Accumulation.SINGLE


class Failing(nn.Module):
    """Two layers around an identity whose backward raises on demand."""

    def __init__(self, mode: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.mode = mode
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mode == "plain":
            hidden = self.first(x)
        else:
            reentrant = self.mode == "reentrant"
            hidden = checkpoint(self.first, x.requires_grad_(), use_reentrant=reentrant)
        if hidden.requires_grad:
            hidden.register_hook(self._hook)
        return self.second(hidden)

    def _hook(self, _grad: torch.Tensor) -> None:
        if self.fails:
            raise ZeroDivisionError("on demand")


MODES = ["plain", "reentrant", "non_reentrant"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("clearing", ["optimizer", "model"])
def test_failed_backward_and_another_try(clearing, micro, mode):
    plain, model = Failing(mode), Failing(mode)
    run(plain, adamw(plain), steps=3, micro=micro)
    with offloaded(model) as optimizer:
        xs = batches(3 * micro)
        run(model, optimizer, steps=1, micro=micro)
        before = weights(model)
        model.fails = True
        with pytest.raises(ZeroDivisionError):
            loss_of(model, xs[0]).backward()
        model.fails = False
        with pytest.raises(GradientError, match="raised"):
            optimizer.step()
        with pytest.raises(GradientError, match="raised"):
            loss_of(model, xs[0]).backward()
        assert same(before, weights(model))
        (optimizer if clearing == "optimizer" else model).zero_grad()
        for index, x in enumerate(xs[micro:]):
            loss_of(model, x).backward()
            if index % micro == micro - 1:
                optimizer.step()
                optimizer.zero_grad()
        assert close(weights(model), weights(plain))


@pytest.mark.parametrize("mode", MODES)
def test_failed_backward_through_the_engine(mode):
    plain, model = Failing(mode), Failing(mode)
    run(plain, adamw(plain), steps=2)
    with _initialize(model) as engine:
        xs = batches(2)
        model.fails = True
        with pytest.raises(ZeroDivisionError):
            engine.backward(loss_of(engine, xs[0]))
        model.fails = False
        with pytest.raises(GradientError, match="ZeroDivisionError"):
            engine.step()
        with pytest.raises(GradientError, match="ZeroDivisionError"):
            engine.backward(loss_of(engine, xs[0]))
        engine.zero_grad()
        for x in xs:
            engine.backward(loss_of(engine, x))
            engine.step()
        assert close(weights(model), weights(plain))


def test_failed_backward_before_any_gradient():
    model = mlp()
    with offloaded(model) as optimizer:
        out = model(batches(1)[0])

        def _fail(_grad):
            raise ZeroDivisionError

        loss = out.pow(2)
        loss.register_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            loss.mean().backward()  # not a gradient of ours was touched
        run(model, optimizer, steps=1)
        out = model(batches(1)[0])
        out.grad_fn.register_prehook(_fail)
        with pytest.raises(ZeroDivisionError):
            out.pow(2).mean().backward()  # the model's output was reached: one backward is lost
        with pytest.raises(GradientError, match="raised"):
            optimizer.step()


def test_step_inside_backward_is_refused():
    model = mlp()
    with offloaded(model) as optimizer:
        caught = []

        def _step(_grad):
            with pytest.raises(GradientError, match="running") as error:
                optimizer.step()
            caught.append(error)

        out = model(batches(1)[0])
        model[0].weight.register_hook(_step)
        out.pow(2).mean().backward()
        assert caught
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_create_graph_is_refused():
    model = mlp()
    with offloaded(model) as optimizer:
        with pytest.raises(GradientError, match="create_graph"):
            loss_of(model, batches(1)[0]).backward(create_graph=True)
        optimizer.zero_grad()
        run(model, optimizer, steps=1)


def test_gradient_penalty_through_autograd_grad():
    """Double backward that ends in `p.grad` without a graph of its own is an ordinary backward."""

    def _loop(model, optimizer):
        for x in batches(3):
            leaf = x.requires_grad_()
            (slope,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
            slope.pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    check_as_plain(_loop)


def test_discarded_windows_keep_no_memory():
    model = mlp()
    with offloaded(model) as optimizer:
        for x in batches(30):
            loss_of(model, x).backward()
            optimizer.zero_grad()
        optimizer.synchronize()
        assert not optimizer.engine.lanes._held
        assert not optimizer.engine._executor.math._begun
