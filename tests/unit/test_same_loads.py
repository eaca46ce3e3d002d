"""State dicts that bring what is there change nothing, whatever is on its way or held back."""

from __future__ import annotations

import copy
import functools
import tempfile

import pytest
import torch
from torch import nn

from compat_cases import bits_of, engine_of, same_bits, train
from config_cases import ZENFLOW, merged
from forebay.optim.reference import round_to

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
FILES = {"device": "nvme", "nvme_path": tempfile.gettempdir(), "buffer_count": 2}
DELAYED = {"forebay": {"update": "delayed", "warm_up_steps": 2}}
ON_HOST = {"stage": 3, "offload_param": {"device": "cpu"}}
IN_FILES = {"stage": 3, "offload_optimizer": FILES, "offload_param": FILES}
MODES = {
    "exact": BF16,
    "whole": FP16,
    "device": merged(BF16, {"zero_optimization": {"offload_optimizer": {"device": "none"}}}),
    "weights_on_host": merged(BF16, {"zero_optimization": ON_HOST}),
    "weights_in_files": merged(BF16, {"zero_optimization": IN_FILES}),
    "speculative": merged(BF16, {"forebay": {"update": "speculative"}}),
    "delayed": merged(BF16, DELAYED),
    "delayed_fp32": DELAYED,
    "delayed_whole": merged(FP16, DELAYED),
    "delayed_files": merged(
        BF16, merged(DELAYED, {"zero_optimization": {"offload_optimizer": FILES}})
    ),
    "zenflow": merged(BF16, {"zero_optimization": {"zenflow": ZENFLOW}}),
    "zenflow_fp32": {"zero_optimization": {"zenflow": ZENFLOW}},
}


def _model(engine):
    engine.load_state_dict(copy.deepcopy(engine.state_dict()))


def _optimizer(engine):
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())


def _both(engine):
    weights = copy.deepcopy(engine.state_dict())
    state = copy.deepcopy(engine.optimizer.state_dict())
    engine.optimizer.load_state_dict(state)
    engine.load_state_dict(weights)


def _after_moves(engine):
    engine.offload_states()
    engine.reload_states()
    _model(engine)


# With an update in flight, or held back, where the mode has any.
_STEPS = 6


@functools.cache
def _undisturbed(mode):
    with engine_of(MODES[mode]) as engine:
        return train(engine, _STEPS), train(engine, 7, seed=5), bits_of(engine)


@pytest.mark.parametrize("load", [_model, _optimizer, _both, _after_moves])
@pytest.mark.parametrize("mode", MODES)
def test_loading_what_is_there_changes_no_bit(mode, load):
    first, more, bits = _undisturbed(mode)
    with engine_of(MODES[mode]) as engine:
        assert train(engine, _STEPS) == first
        load(engine)
        assert train(engine, 7, seed=5) == more
        assert same_bits(bits_of(engine), bits)


def _masters(engine):
    engine.core.settle_masters()
    return {r.label: r.part.master_copy(r.slot) for r in engine.core.collector.records}


def _loaded(mode, change):
    """Masters before and after a load of weights that `change` was applied to."""
    with engine_of(MODES[mode]) as engine:
        train(engine, _STEPS)
        before = _masters(engine)
        state = copy.deepcopy(engine.state_dict())
        change(engine, state)
        engine.load_state_dict(state)
        return before, _masters(engine), state


@pytest.mark.parametrize("mode", ["exact", "device", "weights_on_host"])
def test_what_is_there_beside_one_other_weight_keeps_its_master(mode):
    def _change(_engine, state):
        state["0.weight"][3, 2] += 1

    before, after, state = _loaded(mode, _change)
    assert torch.equal(after.pop("0.weight"), state["0.weight"].float())
    assert same_bits([before[name] for name in after], list(after.values()))


def test_the_sign_of_zero_is_a_bit():
    def _change(engine, state):
        with torch.no_grad():
            engine.module[0].weight.zero_()
        engine.core.settle_masters()
        state["0.weight"] = torch.full_like(state["0.weight"], -0.0)

    _, after, _ = _loaded("exact", _change)
    assert after["0.weight"].signbit().all()


def test_what_was_written_before_is_still_the_users_word():
    def _change(engine, state):
        with torch.no_grad():
            engine.module[0].weight.copy_(state["0.weight"])

    _, after, state = _loaded("exact", _change)
    assert torch.equal(after["0.weight"], state["0.weight"].float())


class _Tied(nn.Module):
    """A module that owns a weight which one inside it owns, too."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(7, 7, bias=False)
        self.weight = self.inner.weight

    def forward(self, x):
        return self.inner(x) @ self.weight


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("other", [None, "weight", "inner.weight"])
def test_a_tied_weight_is_there_once(other, stage):
    torch.manual_seed(0)
    zero = {"zero_optimization": ON_HOST} if stage == 3 else {}
    with engine_of(merged(BF16, zero), model=_Tied()) as engine:
        train(engine, 3)
        before = _masters(engine)["weight"]
        state = copy.deepcopy(engine.state_dict())
        if other is not None:
            state[other] = state[other] + 1
        engine.load_state_dict(state)
        after = _masters(engine)["weight"]
        assert torch.equal(after, before) is (other is None)
        if other is not None:
            assert torch.equal(after, engine.state_dict()["weight"].float())


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("into", ["delayed", "exact", "device"])
@pytest.mark.parametrize("saved", ["delayed", "zenflow"])
def test_a_master_newer_than_the_weight_beside_it_stays_where_they_agree(saved, into, order):
    """Saved without `synchronize()`: the weight is the user's word, and completed by no other."""
    with engine_of(MODES[saved]) as engine:
        train(engine, _STEPS)
        masters, weights = _masters(engine), copy.deepcopy(engine.state_dict())
        state = copy.deepcopy(engine.optimizer.state_dict())
    agrees = {name: round_to(masters[name], torch.bfloat16) == weights[name] for name in weights}
    assert not all(same.all() for same in agrees.values())
    with engine_of(MODES[into]) as engine:
        train(engine, 4, seed=9)
        loads = [(engine, weights), (engine.optimizer, state)]
        for target, value in loads[::order]:
            target.load_state_dict(value)
        engine.set_lr(0.0)
        train(engine, 1)
        for name, found in _masters(engine).items():
            expected = torch.where(agrees[name], masters[name], weights[name].float())
            assert torch.equal(found, expected)
