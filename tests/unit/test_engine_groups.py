"""Parameter groups, schedulers and client optimizers: the groups are the user's, every step."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import forebay
from forebay import ConfigError, UnsupportedError
from forebay.engine import offload_with
from forebay.ops.adam import DeepSpeedCPUAdam, FusedAdam
from unit.engine_cases import (
    CPU,
    PLACES,
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


def _interleaved(model: nn.Sequential) -> list[dict]:
    """First and last parameter in one group, the two between in another; one group is empty."""
    a, b, c, d = model.parameters()
    return [
        {"params": [a, d], "weight_decay": 0.1, "lr": 5e-3},
        {"params": [], "lr": 1.0},
        {"params": [b, c], "weight_decay": 0.0, "betas": (0.8, 0.99), "eps": 1e-6},
    ]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("place", ["host", "resident"])
def test_interleaved_and_empty_groups(kind, place):
    plain = mlp()
    losses = run(plain, kind(_interleaved(plain), lr=1e-2))
    model = mlp()
    source = kind(_interleaved(model), lr=1e-2)
    with offloaded(model, PLACES[place], source) as optimizer:
        assert run(model, optimizer) == pytest.approx(losses, rel=1e-5)
        assert close(weights(model), weights(plain))


def test_groups_are_the_users_own_dictionaries():
    model = mlp()
    source = adamw(model)
    group = source.param_groups[0]
    with offloaded(model, source=source) as optimizer:
        assert optimizer.param_groups is source.param_groups
        assert optimizer.param_groups[0] is group
        assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]
        assert all(p in optimizer.state for p in model.parameters())


def test_rate_is_read_at_every_step():
    def _loop(model, optimizer):
        for rate in (1e-2, 0.0, 3e-3):
            optimizer.param_groups[0]["lr"] = rate
            run(model, optimizer, steps=1)

    plain, model = mlp(), mlp()
    _loop(plain, adamw(plain))
    with offloaded(model) as optimizer:
        _loop(model, optimizer)
        assert close(weights(model), weights(plain))


def test_invalid_rate_leaves_the_window_as_it_was():
    model = mlp()
    with offloaded(model) as optimizer:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.param_groups[0]["lr"] = float("nan")
        before = weights(model)
        with pytest.raises(ConfigError, match="lr"):
            optimizer.step()
        assert same(before, weights(model))
        optimizer.param_groups[0]["lr"] = 1e-2
        optimizer.step()
        assert not same(before, weights(model))


def test_direction_is_one_for_all_groups():
    model = mlp()
    groups = _interleaved(model)
    groups[0]["maximize"] = True
    with pytest.raises(UnsupportedError, match="maximize"):
        offload_with(model, torch.optim.AdamW(groups, lr=1e-2), options=CPU)
    plain, model = mlp(), mlp()
    run(plain, adamw(plain, maximize=True))
    with offloaded(model, source=adamw(model, maximize=True)) as optimizer:
        run(model, optimizer)
        assert close(weights(model), weights(plain))


@pytest.mark.parametrize("name", list(PLACES))
@pytest.mark.parametrize("micro", [1, 3])
def test_going_up_the_gradient_wherever_state_lives(name, micro):
    """Decay still pulls down, and a clipped norm is the same: only the gradient's sign turns."""
    plain, model = mlp(), mlp()
    source = adamw(plain, maximize=True)
    for index, x in enumerate(batches(4 * micro)):
        loss_of(plain, x).backward()
        if index % micro == micro - 1:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            source.step()
            source.zero_grad()
    options = replace(PLACES[name], clip_norm=0.5)
    with offloaded(model, options, source=adamw(model, maximize=True)) as optimizer:
        first, *_, last = run(model, optimizer, micro=micro)
        assert last > first
        assert close(weights(model), weights(plain))


@pytest.mark.parametrize("option", ["amsgrad", "capturable", "differentiable"])
def test_options_that_cannot_be_honoured(option):
    model = mlp()
    before = weights(model)
    with pytest.raises(UnsupportedError, match=option):
        offload_with(model, adamw(model, **{option: True}), options=CPU)
    assert same(before, weights(model))


def test_closure_and_new_groups_are_refused():
    model = mlp()
    with offloaded(model) as optimizer:
        with pytest.raises(UnsupportedError, match="closure"):
            optimizer.step(lambda: 0.0)
        with pytest.raises(UnsupportedError, match="added"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_it_is_a_torch_optimizer():
    model = mlp()
    with offloaded(model) as optimizer:
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.defaults["lr"] == 1e-2
        assert set(optimizer.state_dict()) == {"state", "param_groups"}
        assert "AdamW" not in repr(type(optimizer))
        assert "lr: 0.01" in repr(optimizer)
        seen = []
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
        run(model, optimizer, steps=2)
        assert seen == [1, 1]
        with pytest.raises(UnsupportedError, match="state_dict"):
            copy.deepcopy(optimizer)


def test_the_old_optimizer_does_not_step():
    model = mlp()
    source = adamw(model)
    with offloaded(model, source=source):
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(UnsupportedError, match="returned"):
            source.step()
    model(torch.ones(2, 4)).sum().backward()
    source.step()  # free again


def _construct(kind, optimizer):
    """A scheduler of each class of torch, with the arguments that it cannot do without."""
    needed = {
        "LambdaLR": {"lr_lambda": lambda step: 0.9**step},
        "MultiplicativeLR": {"lr_lambda": lambda step: 0.9},
        "StepLR": {"step_size": 1},
        "MultiStepLR": {"milestones": [1, 2]},
        "ExponentialLR": {"gamma": 0.9},
        "CosineAnnealingLR": {"T_max": 3},
        "CyclicLR": {"base_lr": 1e-3, "max_lr": 1e-2, "cycle_momentum": True, "step_size_up": 2},
        "OneCycleLR": {"max_lr": 1e-2, "total_steps": 5},
        "CosineAnnealingWarmRestarts": {"T_0": 2},
        "SWALR": {"swa_lr": 1e-3},
    }
    if kind.__name__ == "SequentialLR":
        parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return kind(optimizer, parts, milestones=[1])
    if kind.__name__ == "ChainedScheduler":
        return kind([lr_scheduler.ExponentialLR(optimizer, 0.9)])
    return kind(optimizer, **needed.get(kind.__name__, {}))


_ABSTRACT = {"LRScheduler", "_LRScheduler"}
SCHEDULERS = [
    getattr(lr_scheduler, name) for name in lr_scheduler.__all__ if name not in _ABSTRACT
] + [torch.optim.swa_utils.SWALR]


@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("kind", SCHEDULERS, ids=lambda kind: kind.__name__)
def test_every_torch_scheduler(kind, built):
    def _loop(model, optimizer, scheduler):
        rates = []
        for _ in range(4):
            run(model, optimizer, steps=1)
            plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([1.0] if plateau else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    plain, model = mlp(), mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about SequentialLR's arguments
        reference = adamw(plain)
        expected = _loop(plain, reference, _construct(kind, reference))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*epoch parameter.*")
        source = adamw(model)
        scheduler = _construct(kind, source) if built == "before" else None
        with offloaded(model, source=source) as optimizer:
            scheduler = scheduler or _construct(kind, optimizer)
            assert _loop(model, optimizer, scheduler) == expected
            assert close(weights(model), weights(plain))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, DeepSpeedCPUAdam, FusedAdam])
def test_client_optimizers_through_initialize(kind):
    # DeepSpeed's two are AdamW unless told otherwise
    same_rule = torch.optim.Adam if kind is torch.optim.Adam else torch.optim.AdamW
    plain, model = mlp(), mlp()
    losses = run(plain, same_rule(plain.parameters(), lr=1e-2, weight_decay=0.1))
    engine, optimizer, _, _ = forebay.initialize(
        model=model,
        optimizer=kind(model.parameters(), lr=1e-2, weight_decay=0.1),
        config={
            "gradient_clipping": 0,
            "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        },
    )
    with engine:
        assert run(engine.module, optimizer) == pytest.approx(losses, rel=1e-5)
        assert close(weights(model), weights(plain))


def test_deepspeed_adam_without_decoupled_decay():
    plain, model = mlp(), mlp()
    run(plain, torch.optim.Adam(plain.parameters(), lr=1e-2, weight_decay=0.1))
    engine, optimizer, _, _ = forebay.initialize(
        model=model,
        optimizer=DeepSpeedCPUAdam(model.parameters(), lr=1e-2, weight_decay=0.1, adamw_mode=False),
        config={"gradient_clipping": 0},
    )
    with engine:
        run(engine.module, optimizer)
        assert close(weights(model), weights(plain))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam])
def test_other_optimizers_are_refused_before_anything_moves(kind):
    model = mlp()
    pointers = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(UnsupportedError, match=kind.__name__):
        offload_with(model, kind(model.parameters(), lr=1e-2), options=CPU)
    assert pointers == [p.data_ptr() for p in model.parameters()]


def test_state_of_the_given_optimizer_goes_on():
    plain, model = mlp(), mlp()
    reference, source = adamw(plain), adamw(model)
    run(plain, reference, steps=3)
    run(model, source, steps=3)
    with offloaded(model, source=source) as optimizer:
        assert optimizer.state[model[0].weight]["step"] == 3
        run(plain, reference, steps=3)
        run(model, optimizer, steps=3)
        assert close(weights(model), weights(plain))
