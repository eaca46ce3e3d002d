"""Any training loop: the same in every place to the bit, and what plain PyTorch does with it."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from forebay.links import FaultScript
from forebay.plan import UpdatePlace
from unit.engine_cases import CPU, PLACES, adamw, batches, mlp, offloaded, weights

LATE = replace(CPU, fault=FaultScript(seed=5, max_delay_us=300), unit_elements=1, piece_elements=9)
# Sums of earlier backwards come up with the state, late and in any order, and not all find room.
LATE_SUMS = replace(LATE, update=UpdatePlace.STREAMED, backwards=2)
SUMS_IN_LITTLE_ROOM = replace(
    CPU, update=UpdatePlace.STREAMED, backwards=3, unit_elements=1, staging_bytes=6000
)
WAYS = ["optimizer", "zeros", "model", "model_zeros", "none"]
INPUTS = batches(4)

_PARAM = st.integers(0, 3)
_ACTION = st.one_of(
    st.tuples(st.just("backward"), st.integers(0, 3)),
    st.tuples(st.just("last_layer"), st.integers(0, 3)),
    st.tuples(st.just("put"), _PARAM, st.sampled_from([0.0, 1.0, -0.25, float("inf")])),
    st.tuples(st.just("drop"), _PARAM),
    st.tuples(st.just("clear"), st.sampled_from(WAYS)),
    st.tuples(st.just("read"), _PARAM),
    st.tuples(st.just("evaluate"), st.integers(0, 3)),
    st.tuples(st.just("state_dict"), st.none()),
    st.tuples(st.just("round_trip"), st.none()),
)
_CHANGE = st.tuples(st.sampled_from(["assign", "copy", "scale"]), _PARAM)
_WINDOW = st.tuples(
    st.lists(_CHANGE, max_size=1), st.lists(_ACTION, min_size=1, max_size=5), st.sampled_from(WAYS)
)


def _clear(model: nn.Module, optimizer, way: str) -> None:
    if way in {"optimizer", "zeros"}:
        optimizer.zero_grad(set_to_none=way == "optimizer")
    elif way in {"model", "model_zeros"}:
        model.zero_grad(set_to_none=way == "model")
    else:
        for param in model.parameters():
            param.grad = None


def _change(model: nn.Module, optimizer, change: tuple[str, int]) -> None:
    kind, index = change
    param = list(model.parameters())[index]
    if kind == "assign":  # even while the weight is on its way
        param.data = torch.full_like(param, 0.1)
        return
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    with torch.no_grad():
        param.mul_(0.5) if kind == "scale" else param.copy_(torch.full_like(param, -0.2))


def _act(model: nn.Module, optimizer, action: tuple, seen: list) -> None:
    kind, value = action[:2]
    params = list(model.parameters())
    dtype = params[0].dtype
    if kind == "backward":
        (model(INPUTS[value].to(dtype)).float() - 1).pow(2).mean().backward()
    elif kind == "last_layer":
        hidden = torch.tanh(INPUTS[value]).repeat(1, 2)[:, :7].to(dtype)
        model[2](hidden).float().pow(2).mean().backward()
    elif kind == "put":
        params[value].grad = torch.full_like(params[value], action[2])
    elif kind == "drop":
        params[value].grad = None
    elif kind == "clear":
        _clear(model, optimizer, value)
    elif kind == "read" and params[value].grad is not None and dtype is torch.float32:
        seen.append(params[value].grad.clone())
    elif kind == "evaluate":
        with torch.no_grad():
            seen.append(model(INPUTS[value].to(dtype)).float())
    elif kind == "state_dict":
        seen.append(model.state_dict()["0.weight"].clone().float())
    elif kind == "round_trip":
        saved = optimizer.state_dict()
        optimizer.load_state_dict(
            {**saved, "state": {k: dict(v) for k, v in saved["state"].items()}}
        )


def _train(model: nn.Module, optimizer, windows, *, plain: bool) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    for changes, actions, way in windows:
        for change in changes:
            _change(model, optimizer, change)
        for action in actions:
            _act(model, optimizer, action, seen)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if not plain or all(torch.isfinite(grad).all() for grad in grads):
            optimizer.step()
        _clear(model, optimizer, way)
    return seen


def _offloaded(windows, options, dtype):
    model = mlp(dtype)
    with offloaded(model, options) as optimizer:
        seen = _train(model, optimizer, windows, plain=False)
        state = optimizer.state_dict()["state"]
        moments = [entry[name].clone() for entry in state.values() for name in ("exp_avg", "step")]
        return [*seen, *weights(model).values(), *moments]


@settings(max_examples=40, deadline=None)
@given(st.lists(_WINDOW, min_size=1, max_size=4), st.booleans())
def test_every_place_gives_the_same_bits(windows, is_half):
    dtype = torch.bfloat16 if is_half else torch.float32
    expected = _offloaded(windows, PLACES["resident"], dtype)
    ways = (LATE, PLACES["streamed"], PLACES["whole"], LATE_SUMS, SUMS_IN_LITTLE_ROOM)
    for options in ways:
        found = _offloaded(windows, options, dtype)
        for left, right in zip(expected, found, strict=True):
            assert torch.equal(left, right) or bool(left.isnan().all() and right.isnan().all())


@settings(max_examples=40, deadline=None)
@given(st.lists(_WINDOW, min_size=1, max_size=4))
def test_plain_torch_does_the_same(windows):
    plain, model = mlp(), mlp()
    expected = _train(plain, adamw(plain, eps=1e-3), windows, plain=True)
    with offloaded(model, CPU, adamw(model, eps=1e-3)) as optimizer:
        found = _train(model, optimizer, windows, plain=False)
        for left, right in zip(
            [*expected, *weights(plain).values()], [*found, *weights(model).values()], strict=True
        ):
            assert torch.allclose(left, right, rtol=1e-4, atol=1e-5, equal_nan=True)
