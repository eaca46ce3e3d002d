"""ZenFlow through the faces: the configuration reaches the policy, and all else stays."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch
from torch import nn

import forebay
from forebay.engine import EngineOptions, offload_with
from forebay.errors import BudgetError, UnsupportedError
from forebay.optim.loss_scale import StaticLossScale
from forebay.plan import UpdatePlace, WeightPlace
from forebay.plan.memory import forecast
from forebay.plan.ops import Lane
from forebay.plan.policies import EXACT
from forebay.plan.zenflow import ZenFlow
from forebay.tiers.ledger import Role, Tier
from unit.engine_cases import FILES

SECTION = {
    "topk_ratio": 0.2,
    "select_strategy": "step",
    "select_interval": 6,
    "update_interval": 3,
    "full_warm_up_rounds": 1,
    "overlap_step": True,
}
POLICY = ZenFlow(
    topk_ratio=0.2, select_every=6, update_every=3, warm_up_steps=1, overlaps=True, auto_ratio=0.99
)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 30), nn.Tanh(), nn.Linear(30, 4))


def _batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 16, generator=generator) for _ in range(count)]


def _config(stage=2, **section):
    return {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu"},
            "zenflow": {**SECTION, **section},
        },
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_json_trains_as_the_policy_does(stage):
    engine, _, _, _ = forebay.initialize(model=_model(), config=_config(stage))
    assert engine.gradient_accumulation_steps() == 2
    for x in _batches(20):
        engine.backward(engine(x).square().mean())
        engine.step()
    assert engine.global_steps == 10
    engine.synchronize()
    got = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.close()

    model = _model()
    source = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for group in source.param_groups:
        group["weight_decay"] = engine.optimizer.param_groups[0]["weight_decay"]
    options = EngineOptions(
        policy=POLICY, clip_norm=0.5, backwards=2, loss_scale=StaticLossScale(), device="cpu"
    )
    model, optimizer = offload_with(model, source, options=options)
    for count, x in enumerate(_batches(20)):
        (model(x).square().mean() / 2).backward()
        if count % 2:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.synchronize()
    for name, value in model.state_dict().items():
        assert torch.equal(value, got[name]), name
    optimizer.close()


def test_epochs_are_those_of_the_training_data():
    section = {"select_strategy": "epoch", "select_interval": 2, "update_interval": 3}
    data = [(x[0], torch.zeros(4)) for x in _batches(25)]
    engine, _, _, _ = forebay.initialize(
        model=_model(), config=_config(**section), training_data=data
    )
    assert engine.core.placement.policy.select_every == 2 * 3  # 25 samples, 12 for an update
    engine.close()


@pytest.mark.parametrize("stays", [False, True])
def test_every_byte_is_in_the_ledger(stays):
    def placed(policy):
        options = EngineOptions(device="cpu", page_lock=False)
        if policy is not None:
            options = replace(options, policy=policy)
        torch.manual_seed(0)
        model = nn.Linear(1000, 512, bias=False, dtype=torch.bfloat16)
        source = torch.optim.AdamW(model.parameters(), lr=1e-3)
        _, optimizer = offload_with(model, source, options=options)
        ledger, plan = optimizer.engine.ledger, optimizer.engine.placement
        found = {(t, r): ledger.bytes(t, r) for t in Tier for r in Role}
        optimizer.close()
        # the model keeps its weights, which lie where they were
        assert not any(ledger.bytes(t, r) for t in Tier for r in Role if r is not Role.LP_PARAMS)
        return found, plan

    before, placement = placed(None)
    policy = ZenFlow(topk_ratio=0.1, overlaps=True, keeps_state_on_host=stays)
    after, _ = placed(policy)
    more = {key: after[key] - before[key] for key in after if after[key] != before[key]}
    tier = Tier.HOST if stays else Tier.DEVICE
    important = 4 * 100 * 512
    assert more == {
        (tier, Role.HP_PARAMS): important,
        (tier, Role.OPTIM_STATES): 2 * important,
        (Tier.HOST, Role.CONTIGUOUS_GRAD_BUFFER): 2 * 4 * 512_000,
    }
    plans = [replace(placement, policy=policy) for policy in (EXACT, policy)]
    plain, said = (forecast(plan, device_page_bytes=mmap.PAGESIZE) for plan in plans)
    more = {(t.value, r.value): n for (t, r), n in more.items()}
    assert more == {k: said[k] - plain.get(k, 0) for k in said if said[k] != plain.get(k, 0)}


def test_a_budget_counts_it_before_anything_moves():
    def offloaded(model, **options):
        source = torch.optim.AdamW(model.parameters(), lr=1e-3)
        options = EngineOptions(device="cpu", host_budget=40 << 10, **options)
        return offload_with(model, source, options=options)[1]

    offloaded(_model()).close()
    model = _model()
    before = model[0].weight.data_ptr()
    with pytest.raises(BudgetError, match="contiguous_grad_buffer"):
        offloaded(model, policy=POLICY)
    assert model[0].weight.data_ptr() == before


def test_down_goes_a_step_and_up_an_interval():
    torch.manual_seed(0)
    model = nn.Linear(256, 64, bias=False, dtype=torch.bfloat16)
    source = torch.optim.AdamW(model.parameters(), lr=1e-3)
    policy = ZenFlow(topk_ratio=0.25, update_every=4, select_every=None)
    model, optimizer = offload_with(model, source, options=EngineOptions(policy=policy))
    for _ in range(8):
        model(torch.randn(3, 256, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    moved = {lane.value: count for lane, count in optimizer.engine.traffic.items() if count}
    assert moved == {"down": 8 * 2 * 256 * 64, "up": 2 * 2 * 256 * 64}
    planned = optimizer.engine.current_program().traffic
    assert moved == {"down": 8 * planned(Lane.DOWN), "up": 8 * planned(Lane.UP)}
    optimizer.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weights": WeightPlace.HOST}, "does not keep weights on the host"),
        ({"places": lambda spec: [UpdatePlace.NVME] * len(spec.units)}, "not keep state in files"),
        ({"nvme": FILES}, "not keep state in files"),
    ],
)
def test_what_it_does_not_do_is_refused_before_anything_moves(options, text):
    model = _model()
    source = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = model[0].weight.data_ptr()
    with pytest.raises(UnsupportedError, match=text):
        offload_with(model, source, options=EngineOptions(policy=POLICY, **options))
    assert model[0].weight.data_ptr() == before
