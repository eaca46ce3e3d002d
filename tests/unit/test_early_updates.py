"""Updates during backward: what may not come after one, and what is said then."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from compat_cases import engine_of
from forebay.engine import EngineOptions, offload_with
from forebay.engine.options import OverflowCheck, Timing
from forebay.errors import EngineClosedError, GradientError, PendingWeightError, TransferError
from forebay.links import FaultScript
from forebay.optim.loss_scale import StaticLossScale
from forebay.plan import UpdatePlace
from forebay.plan.policies import DuringBackward, Exact
from unit.engine_cases import adamw, batches, loss_of, mlp, run, same, weights

pytestmark = pytest.mark.timeout(60)

UNCHECKED = EngineOptions(device="cpu", overflow=OverflowCheck.OFF)
PLACES = [UpdatePlace.HOST, UpdatePlace.DEVICE]
EARLY = r"updated during backward"


def _steady(options=UNCHECKED, model=None):
    """A model whose units update early from the next backward on."""
    model = model or mlp(torch.bfloat16)
    optimizer = offload_with(model, adamw(model), options=options)[1]
    run(model, optimizer, steps=3)  # a model of blocks shows in the first how often each fires
    return model, optimizer


def _backward(model, count=1):
    for x in batches(count, next(model.parameters()).dtype):
        loss_of(model, x).backward()


def _updated(optimizer):
    return [unit.updated for unit in optimizer.engine.units]


def _refused_for_good(optimizer, model):
    """The engine is closed, says why, and can be closed."""
    with pytest.raises(EngineClosedError, match=EARLY):
        optimizer.step()
    with pytest.raises(EngineClosedError, match=EARLY):
        model.state_dict()
    optimizer.close()
    assert all(p.isnan().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, DuringBackward()),
        ({"overflow": OverflowCheck.SKIP}, Exact()),
        ({"clip_norm": 1.0}, Exact()),
        ({"timing": Timing.SYNCHRONOUS}, Exact()),
        ({"loss_scale": StaticLossScale(8.0)}, Exact()),
    ],
)
def test_when_they_are_legal(changes, expected):
    model = mlp()
    optimizer = offload_with(model, adamw(model), options=replace(UNCHECKED, **changes))[1]
    assert optimizer.engine.placement.policy == expected
    optimizer.close()


@pytest.mark.parametrize("place", PLACES)
def test_from_the_third_window_on(place):
    model = mlp()
    optimizer = offload_with(model, adamw(model), options=replace(UNCHECKED, update=place))[1]
    for _ in range(2):
        _backward(model)
        assert _updated(optimizer) == [False, False]
        optimizer.step()
        optimizer.zero_grad()
    _backward(model)
    assert _updated(optimizer) == [True, True]
    optimizer.step()
    assert _updated(optimizer) == [False, False]
    assert optimizer.last_grad_norm > 0
    optimizer.zero_grad()
    run(model, optimizer, steps=1)
    optimizer.close()


def test_new_weights_stay_away_from_the_device_until_the_step():
    """Backward may still read the old ones: another output, a recomputation."""
    model, optimizer = _steady()
    optimizer.synchronize()
    before = [p.detach().clone() for p in model.parameters()]
    _backward(model)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    optimizer.step()
    after = list(model.state_dict().values())
    assert not any(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    optimizer.close()


@pytest.mark.parametrize("place", PLACES)
def test_a_second_backward(place):
    model, optimizer = _steady(replace(UNCHECKED, update=place))
    if place is UpdatePlace.DEVICE:
        _backward(model)
        with pytest.raises(GradientError, match="call step"):
            model(batches(1, torch.bfloat16)[0])
        optimizer.close()
        return
    with pytest.raises(GradientError, match="another backward began"):
        _backward(model, 2)
    _refused_for_good(optimizer, model)


def test_several_backwards_are_learned_first():
    """Windows of two backwards are not steady until two are expected."""
    model = mlp(torch.bfloat16)
    optimizer = offload_with(model, adamw(model), options=UNCHECKED)[1]
    run(model, optimizer, steps=4, micro=2)
    _backward(model, 2)
    assert _updated(optimizer) == [True, True]
    optimizer.step()
    optimizer.close()


class _Shared(nn.Module):
    """Reentrant blocks over one weight: it fires once for each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.depth = 2
        self.first = nn.Linear(4, 4)
        self.block = nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.depth):
            x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=True)
        return x


@pytest.mark.parametrize("place", PLACES)
def test_a_late_addend(place):
    model, optimizer = _steady(replace(UNCHECKED, update=place, unit_elements=1), _Shared())
    _backward(model)
    assert all(_updated(optimizer))
    optimizer.step()
    optimizer.zero_grad()
    model.depth = 3
    with pytest.raises((GradientError, RuntimeError), match=rf"{EARLY}|call step|inplace"):
        _backward(model)
    with pytest.raises((GradientError, EngineClosedError), match=EARLY):
        optimizer.step()
    optimizer.close()


def test_a_unit_without_all_its_gradients_waits_for_the_step():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(4, 4)
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.turn = 0

        def forward(self, x):
            return self.experts[self.turn % 2](self.first(x))

    def _run(options):
        model = Branches()
        options = replace(options, whole_modules=(model.experts,))
        optimizer = offload_with(model, adamw(model), options=options)[1]
        early = []
        for x in batches(8):
            loss_of(model, x).backward()
            early.append(_updated(optimizer))
            optimizer.step()
            optimizer.zero_grad()
            model.turn += 1
        result = weights(model)
        optimizer.close()
        return result, early

    plain, never = _run(replace(UNCHECKED, overflow=OverflowCheck.SKIP))
    result, early = _run(UNCHECKED)
    assert same(result, plain)
    assert not any(map(any, never))
    assert early[-1] == [True, False]


def test_options_that_change_before_the_step():
    model, optimizer = _steady()
    _backward(model)
    group = optimizer.param_groups[0]
    rate = group["lr"]
    group["lr"] = rate / 2
    with pytest.raises(GradientError, match="options of a parameter group"):
        optimizer.step()
    group["lr"] = rate
    optimizer.step()
    optimizer.clip_grad_norm_(1.0)
    optimizer.zero_grad()
    _backward(model)  # clipped from now on: nothing is early
    assert _updated(optimizer) == [False, False]
    optimizer.step()
    optimizer.close()


def test_clipping_or_dividing_what_was_used():
    model, optimizer = _steady()
    _backward(model)
    optimizer.clip_grad_norm_(1.0)
    with pytest.raises(GradientError, match="clipped gradients"):
        optimizer.step()
    optimizer.engine.terms.clip_norm = None
    with pytest.raises(GradientError, match=r"divided by 0\.5"):
        optimizer.step_with(divisor=0.5)
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("place", PLACES)
def test_discarding_what_was_used(place):
    model, optimizer = _steady(replace(UNCHECKED, update=place))
    _backward(model)
    with pytest.raises(GradientError, match="cannot be discarded"):
        optimizer.zero_grad()
    with pytest.raises(GradientError, match="its unit was updated during backward"):
        optimizer.zero_grad(set_to_none=False)
    param = next(model.parameters())
    with pytest.raises(GradientError, match="its unit was updated during backward"):
        param.grad.norm()
    optimizer.step()
    optimizer.zero_grad()
    _backward(model)
    model.zero_grad()
    with pytest.raises(GradientError, match="cleared or replaced"):
        optimizer.step()
    _refused_for_good(optimizer, model)


def test_writing_what_was_used():
    model, optimizer = _steady()
    _backward(model)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises(GradientError, match="was written before"):
        optimizer.step()
    _refused_for_good(optimizer, model)


def test_writing_what_is_on_its_way():
    model, optimizer = _steady(replace(UNCHECKED, update=UpdatePlace.DEVICE))
    _backward(model)
    with torch.no_grad(), pytest.raises(RuntimeError):
        next(model.parameters()).add_(1.0)  # a stride-0 view of NaN
    with torch.no_grad():
        next(model.parameters()).zero_()
    with pytest.raises(PendingWeightError, match="was written while"):
        optimizer.step()
    optimizer.close()


def test_readers_before_the_step():
    model, optimizer = _steady()
    _backward(model)
    for read in (model.state_dict, optimizer.state_dict, optimizer.synchronize):
        with pytest.raises(GradientError, match="was not called yet"):
            read()
    optimizer.step()
    assert all(value.isfinite().all() for value in model.state_dict().values())
    optimizer.close()


@pytest.mark.parametrize("place", PLACES)
def test_a_backward_that_raises_half_way(place):
    model, optimizer = _steady(replace(UNCHECKED, update=place))

    def _burst(_grad):
        raise ValueError("out of something")

    handle = next(model.parameters()).register_hook(_burst)
    with pytest.raises(ValueError, match="out of something"):
        _backward(model)
    handle.remove()
    assert _updated(optimizer) == [False, True]
    _refused_for_good(optimizer, model)


def test_closing_before_the_step():
    model, optimizer = _steady()
    _backward(model)
    optimizer.close()
    assert all(p.isnan().all() for p in model.parameters())


@pytest.mark.parametrize("fail", ["fail_at", "fail_up_at"])
def test_a_copy_that_fails(fail):
    script = FaultScript(seed=1, max_delay_us=200, fail_text="burning", **{fail: 5})
    model = mlp(torch.bfloat16)
    optimizer = offload_with(model, adamw(model), options=replace(UNCHECKED, fault=script))[1]
    with pytest.raises(TransferError, match="burning"):
        run(model, optimizer, steps=6)
    with pytest.raises(EngineClosedError):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("extra", [{}, {"gradient_accumulation_steps": 3}])
def test_the_configuration_says_so(extra):
    config = {
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "gradient_clipping": 0.0,
        **extra,
    }
    engine = engine_of(config)
    row = next(r for r in engine.config.describe() if r.path == "bf16.check_grad_overflow")
    assert row.note == "units update during backward, from the third window on"
    for _ in range(4):
        for x in batches(engine.gradient_accumulation_steps(), torch.bfloat16, 7):
            engine.backward(loss_of(engine.module, x))
            early = [unit.updated for unit in engine.core.units]
            engine.step()
    assert early == [True, True]
    assert engine.get_global_grad_norm() > 0
    engine.close()
    checked = engine_of({"bf16": {"enabled": True}})
    rows = [r for r in checked.config.describe() if r.path == "bf16.check_grad_overflow"]
    assert not any("during backward" in row.note for row in rows)
    checked.close()
