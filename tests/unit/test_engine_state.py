"""Optimizer state out and in: torch's format, any order, any other placement."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from forebay import CheckpointError, EngineClosedError
from forebay.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from unit.engine_cases import (
    CPU,
    PLACES,
    adamw,
    close,
    masters,
    mlp,
    offloaded,
    run,
    same,
    weights,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _saved(model, optimizer):
    """What a checkpoint of tensors holds, detached from the engine's memory."""
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def _trained(options, dtype, steps):
    model = mlp(dtype)
    with offloaded(model, options) as optimizer:
        run(model, optimizer, steps=steps)
        return _saved(model, optimizer), masters(optimizer)


@pytest.mark.parametrize("order", ["model_first", "optimizer_first"])
@pytest.mark.parametrize("into", PLACES)
@pytest.mark.parametrize("out_of", ["host", "resident", "whole"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_state_goes_from_place_to_place(dtype, out_of, into, order):
    saved, _ = _trained(PLACES[out_of], dtype, 2)
    go_on = mlp(dtype)
    with offloaded(go_on, CPU) as optimizer:  # what the same run does without a break
        run(go_on, optimizer, steps=2)
        run(go_on, optimizer, steps=2)
        expected = masters(optimizer)
    model = mlp(dtype)
    with offloaded(model, PLACES[into], adamw(model, lr=1.0)) as optimizer:
        run(model, optimizer, steps=1)  # what is there is overwritten
        if order == "model_first":
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        else:
            optimizer.load_state_dict(saved["optimizer"])
            model.load_state_dict(saved["model"])
        assert optimizer.param_groups[0]["lr"] == 1e-2
        run(model, optimizer, steps=2)
        assert all(torch.equal(a, b) for a, b in zip(expected, masters(optimizer), strict=True))
        assert optimizer.state[model[0].weight]["step"] == 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_state_is_a_reference_and_masters_are_complete(dtype):
    model = mlp(dtype)
    with offloaded(model) as optimizer:
        run(model, optimizer, steps=2)
        entry = optimizer.state_dict()["state"][0]
        record = optimizer.engine.collector.records[0]
        assert entry["exp_avg"].data_ptr() == record.part.exp_avg.data_ptr()
        names = {"step", "exp_avg", "exp_avg_sq"}
        extra = {torch.bfloat16: {"master_low"}, torch.float16: {"master"}}.get(dtype, set())
        assert set(entry) == names | extra


def test_state_of_plain_torch_loads_and_goes_back():
    plain, model = mlp(), mlp()
    reference = adamw(plain)
    run(plain, reference, steps=3)
    with offloaded(model) as optimizer:
        model.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(reference.state_dict())
        run(plain, reference, steps=2)
        run(model, optimizer, steps=2)
        assert close(weights(model), weights(plain))
        again = mlp()
        third = adamw(again)
        again.load_state_dict(model.state_dict())
        third.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch keeps references
        run(again, third, steps=2)
        run(model, optimizer, steps=2)
        assert close(weights(model), weights(again))


def test_empty_state_makes_a_fresh_start():
    model = mlp()
    with offloaded(model) as optimizer:
        start = weights(model)
        run(model, optimizer, steps=2)
        expected = weights(model)
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": {}, "param_groups": groups})
        model.load_state_dict(start)
        assert not optimizer.state[model[0].weight]["exp_avg"].any()
        run(model, optimizer, steps=2)
        assert same(weights(model), expected)


def test_weights_win_where_they_are_not_the_master_rounded():
    """Other weights than those of the saved run: the user's word is the weight."""
    for place in ("whole", "resident_whole"):
        saved, _ = _trained(PLACES[place], torch.bfloat16, 2)
        model = mlp(torch.bfloat16)
        with offloaded(model, PLACES[place]) as optimizer:
            optimizer.load_state_dict(saved["optimizer"])
            other = {n: torch.full_like(v, 0.25) for n, v in model.state_dict().items()}
            model.load_state_dict(other)
            model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
            optimizer.param_groups[0]["lr"] = 0.0
            optimizer.step()
            assert all(bool((m == 0.25).all()) for m in masters(optimizer))


def test_a_loaded_master_serves_once():
    """A weight that the user changes long after a load is not completed by the loaded bits."""
    model = mlp(torch.bfloat16)
    with offloaded(model) as optimizer:
        run(model, optimizer, steps=2)
        optimizer.load_state_dict(_saved(model, optimizer)["optimizer"])
        run(model, optimizer, steps=1)
        optimizer.synchronize()
        with torch.no_grad():
            model[0].weight.fill_(0.5)
        assert bool((masters(optimizer)[0] == 0.5).all())


def test_wrong_state_changes_nothing():
    model = mlp()
    with offloaded(model) as optimizer:
        run(model, optimizer, steps=1)
        saved = _saved(model, optimizer)["optimizer"]
        before = _saved(model, optimizer)
        wrong_shape = {**saved, "state": {**saved["state"]}}
        wrong_shape["state"][2] = {**saved["state"][2], "exp_avg": torch.zeros(2)}
        with pytest.raises(CheckpointError, match=r"exp_avg of 2\.weight has shape \(2,\)"):
            optimizer.load_state_dict(wrong_shape)
        missing = {**saved, "state": {**saved["state"], 1: {"step": 1}}}
        with pytest.raises(CheckpointError, match="no exp_avg"):
            optimizer.load_state_dict(missing)
        groups = {**saved, "param_groups": saved["param_groups"] * 2}
        with pytest.raises(CheckpointError, match="groups of"):
            optimizer.load_state_dict(groups)
        after = _saved(model, optimizer)
        for index, entry in before["optimizer"]["state"].items():
            for name, value in entry.items():
                assert torch.equal(value, after["optimizer"]["state"][index][name])


@pytest.mark.parametrize("place", PLACES)
def test_helpers_read_and_write_masters_and_moments(place):
    model = mlp(torch.bfloat16)
    with offloaded(model, PLACES[place]) as optimizer:
        run(model, optimizer, steps=1)
        param = model[0].weight
        value = torch.linspace(-1, 1, param.numel()).reshape(param.shape)
        safe_set_full_fp32_param(param, value)
        assert torch.equal(safe_get_full_fp32_param(param), value)
        assert torch.allclose(model[0].weight.float(), value, atol=2**-8)
        safe_set_full_optimizer_state(param, value.abs(), "exp_avg_sq")
        assert torch.equal(safe_get_full_optimizer_state(param, "exp_avg_sq"), value.abs())
        with torch.no_grad():
            param.fill_(3.0)
        assert bool((safe_get_full_fp32_param(param) == 3.0).all())


@pytest.mark.parametrize("place", ["host", "streamed"])
def test_state_set_between_backward_and_step_is_used(place):
    """The state may be on its way to the device at that time."""
    results = []
    for options in (PLACES["resident"], PLACES[place]):
        model = mlp()
        with offloaded(model, options) as optimizer:
            run(model, optimizer, steps=1)
            model(torch.ones(2, 4)).sum().backward()
            for param in model.parameters():
                safe_set_full_optimizer_state(param, torch.full_like(param, 9.0), "exp_avg_sq")
            optimizer.step()
            results.append(weights(model))
    assert same(*results)


def test_closed_engines_refuse():
    model = mlp()
    with offloaded(model) as optimizer:
        run(model, optimizer, steps=1)
    for read in (optimizer.state_dict, optimizer.step, optimizer.zero_grad, optimizer.synchronize):
        with pytest.raises(EngineClosedError, match="closed"):
            read()
    optimizer.close()
