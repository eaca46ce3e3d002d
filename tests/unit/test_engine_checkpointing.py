"""Activation checkpointing of both kinds, weights shared by several blocks, compiled blocks."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from forebay import UnsupportedError
from forebay.engine import offload_with
from forebay.engine.unit import WeightState
from forebay.links import FaultScript
from unit.engine_cases import CPU, PLACES, RESIDENT, adamw, batches, offloaded, run, same

LATE = replace(CPU, fault=FaultScript(seed=0, max_delay_us=3000))


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Stack(nn.Module):
    """Three blocks between two layers; the blocks may be checkpointed and share a weight."""

    def __init__(self, mode: str = "plain", shared: str = "nothing") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mode = mode
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.last = nn.Linear(6, 3)
        if shared == "weight":
            for block in self.blocks[1:]:
                block.a.weight = self.blocks[0].a.weight
        elif shared == "block":
            self.blocks = nn.ModuleList([self.blocks[0]] * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.mode == "plain":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.mode == "reentrant")
        return self.last(x)


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """By name, whatever is compiled."""
    state = model.state_dict()
    return {name.replace("_orig_mod.", ""): value.clone() for name, value in state.items()}


@functools.cache
def _expected(mode: str, shared: str, micro: int):
    model = Stack(mode, shared)
    with offloaded(model, RESIDENT) as optimizer:
        return run(model, optimizer, micro=micro), _weights(model)


@pytest.mark.parametrize("mode", ["plain", "reentrant", "non_reentrant"])
@pytest.mark.parametrize("shared", ["nothing", "weight", "block"])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("place", ["host", "streamed", "late", "a_unit_each"])
def test_checkpointed_and_shared(place, micro, shared, mode):
    options = {
        **PLACES,
        "late": LATE,
        "a_unit_each": replace(LATE, unit_elements=1),
    }[place]
    losses, expected = _expected(mode, shared, micro)
    model = Stack(mode, shared)
    with offloaded(model, options) as optimizer:
        assert run(model, optimizer, micro=micro) == losses
        assert same(_weights(model), expected)


def test_checkpointing_does_not_change_a_bit():
    """Shared weights fire once per reentrant block, so only those sums are made elsewhere."""
    for shared in ("nothing", "weight", "block"):
        assert same(_expected("plain", shared, 1)[1], _expected("non_reentrant", shared, 1)[1])
    assert same(_expected("plain", "nothing", 1)[1], _expected("reentrant", "nothing", 1)[1])


def _compile_blocks_as_modules(model: Stack) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager")


def _compile_blocks_in_place(model: Stack) -> None:
    for block in model.blocks:
        block.compile(backend="eager")


COMPILES = {"modules": _compile_blocks_as_modules, "in_place": _compile_blocks_in_place}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("compiled", COMPILES)
@pytest.mark.parametrize("unit_elements", [None, 1])
def test_compiled_blocks(unit_elements, compiled, when):
    losses, expected = _expected("plain", "nothing", 1)
    model = Stack()
    if when == "before":
        COMPILES[compiled](model)
    with offloaded(model, replace(LATE, unit_elements=unit_elements)) as optimizer:
        if when == "after":
            COMPILES[compiled](model)
        assert run(model, optimizer) == losses
        assert same(_weights(model), expected)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("compiled", COMPILES)
def test_compiled_blocks_wait_for_themselves_alone(compiled, when):
    """While a block computes, later ones may still be on their way."""
    model = Stack()
    if when == "before":
        COMPILES[compiled](model)
    with offloaded(model, LATE) as optimizer:
        if when == "after":
            COMPILES[compiled](model)
        run(model, optimizer, steps=3)
        model(batches(1)[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        states = []

        def _look():
            states.append([unit.state for unit in optimizer.engine.units])

        model.first.register_forward_hook(lambda *_: _look())
        model(batches(1)[0])
        ready = [state is WeightState.READY for state in states[0]]
        assert ready[0]
        assert not all(ready)
        assert all(unit.state is WeightState.READY for unit in optimizer.engine.units)


@pytest.mark.parametrize("way", ["function", "in_place"])
def test_root_compiled_afterwards(way):
    losses, expected = _expected("plain", "nothing", 1)
    model = Stack()
    with offloaded(model, LATE) as optimizer:
        if way == "function":
            call = torch.compile(model, backend="eager")
        else:
            model.compile(backend="eager")
            call = model
        found = []
        for x in batches(4):
            loss = (call(x).float() - 1.0).pow(2).mean()
            loss.backward()
            found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        assert found == losses
        assert same(_weights(model), expected)


@pytest.mark.parametrize("way", ["function", "in_place"])
def test_root_compiled_before_is_refused(way):
    model = Stack()
    if way == "function":
        wrapped = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
        wrapped = model
    pointers = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(UnsupportedError, match=r"its blocks before .* where weights stay"):
        offload_with(wrapped, adamw(model), options=CPU)
    assert pointers == [p.data_ptr() for p in model.parameters()]


@pytest.mark.parametrize("mode", ["reentrant", "non_reentrant"])
def test_compiled_and_checkpointed(mode):
    losses, expected = _expected("plain", "nothing", 1)
    model = Stack(mode)
    with offloaded(model, LATE) as optimizer:
        _compile_blocks_in_place(model)
        assert run(model, optimizer) == losses
        assert same(_weights(model), expected)


def test_closing_undoes_the_wrappers():
    model = Stack()
    _compile_blocks_in_place(model)
    calls = [block._compiled_call_impl for block in model.blocks]
    with offloaded(model) as optimizer:
        run(model, optimizer, steps=1)
    assert [block._compiled_call_impl for block in model.blocks] == calls
    assert torch.isfinite(model(batches(1)[0])).all()
