"""Weights on their way: no reader sees them stale or torn, and no write to them is lost."""

from __future__ import annotations

import copy
import io
import math
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from forebay import PendingWeightError
from forebay.engine.options import Timing
from forebay.engine.reads import EarlyReads
from forebay.engine.unit import WeightState
from forebay.links import FaultScript
from unit.engine_cases import (
    CPU,
    RESIDENT,
    adamw,
    batches,
    close,
    loss_of,
    mlp,
    offloaded,
    run,
    same,
    weights,
)

# Every copy is late: whoever does not wait sees it.
LATE = replace(CPU, fault=FaultScript(seed=0, max_delay_us=20_000))


def _step(model, optimizer, number: int = 0):
    loss_of(model, batches(number + 1, next(model.parameters()).dtype)[number]).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("write", ["zero_", "fill_"])
def test_writes_that_the_arrival_would_undo_raise(write):
    model = mlp()
    with offloaded(model, LATE) as optimizer:
        _step(model, optimizer)
        with torch.no_grad():
            args = () if write == "zero_" else (1.0,)
            getattr(model[0].weight, write)(*args)
        with pytest.raises(PendingWeightError, match=r"0\.weight was written"):
            model(batches(1)[0])
        assert torch.isfinite(model(batches(1)[0])).all()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3, 2)], ids=str)
def test_writes_through_data_raise_at_the_next_step(shape):
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.other = nn.Parameter(torch.ones(shape)), nn.Linear(2, 1)

        def forward(self, x):
            return self.other(x) * self.weight.sum()

    model = One()
    with offloaded(model, LATE) as optimizer:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.weight.data.fill_(5.0)
        if shape in {(), (1,), (1, 1)}:  # nobody else reads what was written
            assert model.other.weight.isnan().all()
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(PendingWeightError, match="synchronize"):
            optimizer.step()


def test_most_writes_to_pending_weights_raise_at_once():
    model = mlp()
    with offloaded(model, LATE) as optimizer:
        _step(model, optimizer)
        with pytest.raises(RuntimeError), torch.no_grad():
            model[0].weight.mul_(2)
        with pytest.raises(RuntimeError):
            model[0].weight.data.copy_(torch.ones(7, 4))


def test_readers_between_step_and_forward_see_nan_or_wait():
    model = mlp()
    with offloaded(model, LATE) as optimizer:
        _step(model, optimizer)
        average = {n: p.detach().clone() for n, p in model.named_parameters()}
        assert all(value.isnan().all() for value in average.values())
        assert not torch.isnan(torch.cat([v.flatten() for v in weights(model).values()])).any()
        optimizer.synchronize()
        assert torch.isfinite(model[0].weight).all()


READERS = {
    "state_dict": lambda m: m.state_dict(),
    "block_state_dict": lambda m: {"0." + n: v for n, v in m[0].state_dict().items()},
    "deepcopy": lambda m: copy.deepcopy(m).state_dict(),
    "block_deepcopy": lambda m: {"0." + n: v for n, v in copy.deepcopy(m[0]).state_dict().items()},
    "wrapped": lambda m: {
        n.removeprefix("0."): v for n, v in nn.Sequential(m, nn.ReLU()).state_dict().items()
    },
    "deepcopy_of_a_wrapper": lambda m: copy.deepcopy(nn.Sequential(m))[0].state_dict(),
}


@pytest.mark.parametrize("reader", READERS)
def test_readers_that_pass_the_barrier(reader):
    expected = mlp()
    with offloaded(expected, replace(CPU, timing=Timing.SYNCHRONOUS)) as optimizer:
        _step(expected, optimizer)
        wanted = weights(expected)
    model = mlp()
    with offloaded(model, LATE) as optimizer:
        _step(model, optimizer)
        found = READERS[reader](model)
        assert all(torch.equal(value, wanted[name]) for name, value in found.items())


def test_state_passes_the_barrier():
    model = mlp()
    with offloaded(model, LATE) as optimizer:
        _step(model, optimizer)
        assert optimizer.state[model[0].weight]["exp_avg"].any()
        assert all(unit.state is WeightState.READY for unit in optimizer.engine.units)


def test_copies_are_free_of_the_engine():
    model = mlp()
    with offloaded(model, LATE) as optimizer:
        _step(model, optimizer)
        twin = copy.deepcopy(model)
        before = weights(twin)
        _step(model, optimizer, 1)
        assert same(weights(twin), before)  # and its forward waits for nobody
        assert torch.isfinite(twin(batches(1)[0])).all()
        loss_of(twin, batches(1)[0]).backward()
        assert type(twin[0].weight.grad) is torch.Tensor
        with offloaded(twin) as other:
            _step(twin, other)
        assert not same(weights(twin), before)


def test_pickled_models():
    model = mlp()
    with offloaded(model, LATE) as optimizer:
        _step(model, optimizer)
        with pytest.raises(PendingWeightError, match="synchronize"):
            pickle.dumps(model)
        twin = pickle.loads(pickle.dumps(model))  # the first try has waited
        assert same(weights(twin), weights(model))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        assert same(weights(torch.load(buffer, weights_only=False)), weights(model))


def test_save_pretrained_passes_the_barrier(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    model = transformers.LlamaForCausalLM(config)
    with offloaded(model, LATE) as optimizer:
        ids = torch.arange(6)[None]
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        model.save_pretrained(tmp_path)
        saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
        assert same(saved, weights(model))


class Borrower(nn.Module):
    """Uses another module's weight without calling it."""

    def __init__(self, order: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order = order
        self.lent = nn.ModuleDict({"layer": nn.Linear(4, 4)})
        self.own = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.order == "called_after":
            x = torch.tanh(nn.functional.linear(x, self.lent["layer"].weight))
            return self.own(self.lent["layer"](x))
        if self.order == "called_before":
            x = self.lent["layer"](x)
        return self.own(torch.tanh(nn.functional.linear(x, self.lent["layer"].weight)))


@pytest.mark.parametrize("order", ["never_called", "called_before", "called_after"])
@pytest.mark.parametrize("unit_elements", [None, 1])
def test_borrowed_weights_are_right(unit_elements, order):
    plain, model = Borrower(order), Borrower(order)
    run(plain, adamw(plain))
    with offloaded(model, replace(LATE, unit_elements=unit_elements)) as optimizer:
        run(model, optimizer)
        assert close(weights(model), weights(plain))


def test_reads_that_no_graph_shows_raise():
    """Reentrant checkpointing leaves no graph; the step that finds NaN every other time tells."""

    class Hidden(Borrower):
        def forward(self, x):
            weight = self.lent["layer"].weight
            x = x.requires_grad_()
            borrow = lambda y: torch.tanh(nn.functional.linear(y, weight))  # noqa: E731
            return self.own(self.lent["layer"](checkpoint(borrow, x, use_reentrant=True)))

    model = Hidden("hidden")
    with offloaded(model, LATE) as optimizer:
        with pytest.raises(PendingWeightError, match=r"lent\.layer|read before its module"):
            run(model, optimizer, steps=12)
        synchronous = replace(LATE, timing=Timing.SYNCHRONOUS)
    with offloaded(model, synchronous) as optimizer:
        assert all(map(math.isfinite, run(model, optimizer, steps=3)))


@pytest.mark.parametrize(
    ("outcomes", "raises"),
    [
        ("F pN F pN F pN", True),
        ("F pN F pF pN F pN F", False),
        ("F pN N F pN F pN", False),
        ("F pN pN pN pN pN", False),
        ("N N N F pF pF", False),
    ],
)
def test_early_reads_are_told_from_other_trouble(outcomes, raises):
    """F and N: finite or not; p: the window began with weights on their way."""
    reads = EarlyReads(deferred=True)

    def _run():
        windows = outcomes.split()
        for window, following in zip(windows, [*windows[1:], ""], strict=True):
            applied = following.startswith("p")
            reads.note(finite=window.endswith("F"), applied=applied, bad="w")

    if raises:
        with pytest.raises(PendingWeightError, match="synchronize"):
            _run()
    else:
        _run()


def test_weights_that_no_module_call_precedes():
    """Only submodules' functions are used, none is called: step() waits for the weights itself."""

    def _loop(model, optimizer):
        for x in batches(4):
            hidden = nn.functional.linear(x, model[0].weight, model[0].bias)
            (model[2].forward(torch.tanh(hidden)) - 1.0).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    plain, model = mlp(), mlp()
    _loop(plain, adamw(plain))
    with offloaded(model, LATE) as optimizer:
        _loop(model, optimizer)
        assert close(weights(model), weights(plain))


@pytest.mark.parametrize("unit_elements", [None, 1])
def test_attention_that_does_not_call_its_projection(unit_elements):
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.attend(x[None], x[None], x[None])[0])

    other, model = Attend(), Attend()
    with offloaded(other, RESIDENT) as reference:
        losses = run(other, reference)
        expected = weights(other)
    with offloaded(model, replace(LATE, unit_elements=unit_elements)) as optimizer:
        assert run(model, optimizer) == losses
        assert same(weights(model), expected)
