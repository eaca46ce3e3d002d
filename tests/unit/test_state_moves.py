"""State that leaves the device and comes back: the same bits, memory given back, clear refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import forebay
from compat_cases import engine_of, train
from forebay.engine import EngineOptions, offload_with, state_moves
from forebay.engine.options import SumPlace
from forebay.engine.state_moves import MOVABLE, HostPages, MoveTiming
from forebay.errors import (
    BudgetError,
    ConfigError,
    EngineClosedError,
    StateAwayError,
    TransferError,
    UnsupportedError,
)
from forebay.links import FaultScript
from forebay.plan import SixteenBitMaster, UpdatePlace, WeightPlace
from forebay.plan.zenflow import ZenFlow
from forebay.tiers.ledger import Role, Tier
from numerics.test_exactness import DEVICES
from unit.engine_cases import adamw, batches, loss_of, mlp, run

pytestmark = pytest.mark.timeout(60)

WHOLE = SixteenBitMaster.WHOLE
KINDS = {
    "device": EngineOptions(update=UpdatePlace.DEVICE),
    "device_whole": EngineOptions(update=UpdatePlace.DEVICE, bf16_master=WHOLE),
    "host": EngineOptions(update=UpdatePlace.HOST),
    "streamed": EngineOptions(update=UpdatePlace.STREAMED),
    "weights_on_host": EngineOptions(weights=WeightPlace.HOST),
    "zenflow": EngineOptions(policy=ZenFlow(topk_ratio=0.2, update_every=2, select_every=3)),
}


def _train(options, *, between=None, steps=4, micro=1, dtype=torch.bfloat16, inside=False):
    """Bits after some steps; `between` runs after each, or between backward and step."""
    model = mlp(dtype)
    device = torch.device(options.device or "cpu")
    optimizer = offload_with(model, adamw(model), options=replace(options, device=device))[1]
    for step in range(steps):
        for x in batches(steps * micro, dtype)[step * micro : (step + 1) * micro]:
            loss_of(model, x.to(device)).backward()
        if between is not None and inside:
            between(optimizer.engine)
        optimizer.step()
        optimizer.zero_grad()
        if between is not None and not inside:
            between(optimizer.engine)
    optimizer.synchronize()
    found = [value.clone().cpu() for value in model.state_dict().values()]
    for entry in optimizer.state.values():
        found += [value.clone().cpu() for value in entry.values()]
    optimizer.close()
    return found


def _same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _round_trip(roles, timing):
    def move(engine):
        engine.moves.offload(roles, pages=HostPages.LOCKED, timing=timing)
        engine.moves.reload(timing=timing)

    return move


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("timing", MoveTiming)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits(kind, timing, device):
    options = replace(KINDS[kind], device=device)
    expected = _train(options)
    if timing is MoveTiming.ENQUEUE:  # what comes back must follow what still leaves
        options = replace(options, fault=FaultScript(seed=2, max_delay_us=1500))
    for roles in (MOVABLE, (Role.LP_PARAMS,), (Role.OPTIM_STATES, Role.HP_PARAMS)):
        _same(expected, _train(options, between=_round_trip(roles, timing)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("timing", MoveTiming)
@pytest.mark.parametrize("micro", [1, 3])
def test_a_batch_of_its_own_for_everything(micro, timing, device, monkeypatch):
    """Memory changes hands while other batches, late ones too, are still on the link."""
    monkeypatch.setattr(state_moves, "_BATCH_BYTES", 1)
    options = replace(KINDS["device"], device=device, backwards=micro, sum_place=SumPlace.DEVICE)
    expected = _train(options, micro=micro)
    late = replace(options, fault=FaultScript(seed=2, max_delay_us=1500))
    move = _round_trip(MOVABLE, timing)
    _same(expected, _train(late, between=move, micro=micro, inside=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("kind", ["device", "host"])
def test_inside_a_window(kind, micro, device):
    """Gradients that are on the device leave and come back too."""
    sums = SumPlace.DEVICE
    options = replace(KINDS[kind], device=device, backwards=micro, sum_place=sums)
    expected = _train(options, micro=micro)
    for roles in (MOVABLE, (Role.LP_GRADS, Role.CONTIGUOUS_GRAD_BUFFER)):
        move = _round_trip(roles, MoveTiming.WAIT)
        _same(expected, _train(options, between=move, micro=micro, inside=True))


def _engine(options=KINDS["device"], dtype=torch.bfloat16):
    model = mlp(dtype)
    optimizer = offload_with(model, adamw(model), options=replace(options, device="cpu"))[1]
    run(model, optimizer, steps=2)
    return model, optimizer, optimizer.engine


@pytest.mark.parametrize("count", range(1, 4))
def test_the_device_has_exactly_what_stays(count):
    _, optimizer, engine = _engine()
    before = {role: engine.ledger.bytes(Tier.DEVICE, role) for role in MOVABLE}
    for roles in itertools.combinations(MOVABLE[:3], count):
        moved = engine.moves.offload(roles, pages=HostPages.LOCKED)
        for role in MOVABLE:
            here = engine.ledger.bytes(Tier.DEVICE, role)
            assert here == (0 if role in roles else before[role])
        assert 0 < moved <= sum(before[role] for role in roles)
        assert engine.moves.reload() == moved
        assert {role: engine.ledger.bytes(Tier.DEVICE, role) for role in MOVABLE} == before
        engine.ledger.check()
    optimizer.close()


def test_compact_state_of_important_columns_makes_room_without_a_copy():
    """It goes home before anything leaves, and comes from there with the next update."""
    model, optimizer, engine = _engine(KINDS["zenflow"])
    state = (Role.OPTIM_STATES, Role.HP_PARAMS)
    before = [engine.ledger.bytes(Tier.DEVICE, role) for role in state]
    assert min(before) > 0
    for _ in range(2):
        assert engine.moves.offload(state, pages=HostPages.LOCKED) == 0
        assert [engine.ledger.bytes(Tier.DEVICE, role) for role in state] == [0, 0]
        with pytest.raises(StateAwayError):
            optimizer.step()
        engine.moves.reload()
        assert [engine.ledger.bytes(Tier.DEVICE, role) for role in state] == before
        run(model, optimizer, steps=1)
    optimizer.close()


def test_buffers_are_used_again_and_given_back():
    _, optimizer, engine = _engine()
    engine.moves.offload(MOVABLE, pages=HostPages.LOCKED)
    first = {key: buffer.address for key, buffer in engine.moves._buffers.items()}
    host = engine.ledger.bytes(Tier.HOST)
    for _ in range(3):
        engine.moves.reload()
        engine.moves.offload(MOVABLE, pages=HostPages.LOCKED)
        assert {key: buffer.address for key, buffer in engine.moves._buffers.items()} == first
        assert engine.ledger.bytes(Tier.HOST) == host
    optimizer.close()
    assert engine.ledger.bytes(Tier.HOST) == 0


def test_what_is_away_stays_and_more_may_follow():
    model, optimizer, engine = _engine()
    kept = [value.clone() for value in model.state_dict().values()]
    engine.moves.offload([Role.OPTIM_STATES], pages=HostPages.PAGEABLE)
    assert engine.moves.offload([Role.OPTIM_STATES], pages=HostPages.PAGEABLE) == 0
    assert engine.moves.offload([Role.LP_PARAMS], pages=HostPages.PAGEABLE) > 0
    engine.moves.reload()
    assert engine.moves.reload() == 0
    for before, after in zip(kept, model.state_dict().values(), strict=True):
        assert torch.equal(before, after)
    optimizer.close()


@pytest.mark.parametrize("timing", MoveTiming)
@pytest.mark.parametrize("kind", KINDS)
def test_reloading_what_never_left_moves_nothing(kind, timing):
    """Right after a step, too: new weights that are on their way are waited for all the same."""

    def _reload(engine):
        moved = dict(engine.traffic)
        assert engine.moves.reload(timing=timing) == 0
        assert dict(engine.traffic) == moved

    late = replace(KINDS[kind], fault=FaultScript(seed=2, max_delay_us=1500))
    _same(_train(KINDS[kind]), _train(late, between=_reload))


def test_generating_without_optimizer_state():
    """The loop of reinforcement learning: weights stay, the rest makes room."""
    model, optimizer, engine = _engine()
    engine.moves.offload([Role.OPTIM_STATES, Role.HP_PARAMS], pages=HostPages.LOCKED)
    with torch.no_grad():
        assert model(batches(1, torch.bfloat16)[0]).isfinite().all()
    loss_of(model, batches(1, torch.bfloat16)[0]).backward()
    with pytest.raises(StateAwayError, match=r"step\(\): hp_params, optim_states have left"):
        optimizer.step()
    engine.moves.reload()
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("kind", ["device", "host"])
def test_weights_that_are_away_are_refused(kind):
    model, optimizer, engine = _engine(KINDS[kind])
    engine.moves.offload([Role.LP_PARAMS], pages=HostPages.LOCKED)
    assert all(p.isnan().all() for p in model.parameters())
    for use in (
        lambda: model(batches(1, torch.bfloat16)[0]),
        model.state_dict,
        optimizer.state_dict,
        lambda: optimizer.state,
        optimizer.step,
    ):
        with pytest.raises(StateAwayError, match="reload_states"):
            use()
    optimizer.synchronize()  # moves are over; nothing else is asked for
    engine.moves.reload()
    run(model, optimizer, steps=1)
    optimizer.close()


@pytest.mark.parametrize("kind", ["device", "host"])
def test_backward_through_weights_that_are_away_is_refused(kind):
    """The graph has kept the old ones, but their gradients would come to weights that are away."""
    model, optimizer, engine = _engine(KINDS[kind])
    loss = loss_of(model, batches(1, torch.bfloat16)[0])
    engine.moves.offload([Role.LP_PARAMS], pages=HostPages.LOCKED)
    with pytest.raises(StateAwayError, match="backward: lp_params has left"):
        loss.backward()
    engine.moves.reload()
    optimizer.zero_grad()
    run(model, optimizer, steps=1)
    optimizer.close()


@pytest.mark.parametrize("fault", [{"fail_at": 0}, {"fail_up_at": 0}])
def test_a_move_of_weights_that_fails_leaves_an_ordinary_model_of_nan(fault):
    """Whatever is asked for says that it is closed; afterwards a state dict can be loaded."""
    kept = mlp(torch.bfloat16).state_dict()
    options = replace(KINDS["device"], fault=FaultScript(seed=0, **fault))
    model, optimizer, engine = _engine(options)
    with pytest.raises(TransferError, match="scripted"):
        engine.moves.offload(MOVABLE, pages=HostPages.LOCKED)
        engine.moves.reload()
    for use in (optimizer.step, model.state_dict, optimizer.synchronize, engine.moves.reload):
        with pytest.raises(EngineClosedError):
            use()
    optimizer.close()
    assert all(p.isnan().all() for p in model.parameters())
    model.load_state_dict(kept)
    assert all(torch.equal(kept[name], p) for name, p in model.named_parameters())


def test_weights_on_the_host_come_up_when_they_are_used():
    model, optimizer, engine = _engine(KINDS["weights_on_host"])
    engine.moves.offload(MOVABLE, pages=HostPages.LOCKED)
    run(model, optimizer, steps=1)
    optimizer.close()


def test_closing_brings_the_weights_home():
    model, optimizer, engine = _engine()
    kept = [value.clone() for value in model.state_dict().values()]
    engine.moves.offload(MOVABLE, pages=HostPages.LOCKED)
    optimizer.close()
    for before, param in zip(kept, model.parameters(), strict=True):
        assert torch.equal(before, param)


def test_a_host_without_room_keeps_everything_where_it_is():
    model, optimizer, engine = _engine(replace(KINDS["device"], host_budget=4096))
    before = [engine.ledger.bytes(tier) for tier in Tier]
    with pytest.raises(BudgetError):
        engine.moves.offload(MOVABLE, pages=HostPages.LOCKED)
    assert [engine.ledger.bytes(tier) for tier in Tier] == before
    run(model, optimizer, steps=1)
    optimizer.close()


def test_a_device_without_room_for_the_last_batch_keeps_everything_on_the_host(monkeypatch):
    monkeypatch.setattr(state_moves, "_BATCH_BYTES", 1)
    options = replace(KINDS["device"], device_budget=1 << 20)
    model, optimizer, engine = _engine(options)
    kept = [value.clone() for value in model.state_dict().values()]
    held = engine.ledger.bytes(Tier.DEVICE)
    engine.moves.offload(MOVABLE, pages=HostPages.LOCKED)
    away, left = engine.ledger.bytes(Tier.DEVICE), engine.moves._arenas[-1][0].nbytes
    taken = engine.ledger.reserve(
        Tier.DEVICE, Role.STAGING, (1 << 20) - held + left // 2, what="another's"
    )
    for _ in range(2):
        with pytest.raises(BudgetError):
            engine.moves.reload()
        assert engine.ledger.bytes(Tier.DEVICE) == away + taken.nbytes
    taken.release()
    engine.moves.reload()
    assert engine.ledger.bytes(Tier.DEVICE) == held
    for before, after in zip(kept, model.state_dict().values(), strict=True):
        assert torch.equal(before, after)
    run(model, optimizer, steps=1)
    optimizer.close()


def test_weights_that_were_written_travel_as_they_are():
    """What the user wrote, or put into `p.data`, since the last step, or while it was away."""

    def _run(move):
        model, optimizer, engine = _engine(KINDS["host"])
        first, second, third = list(model.parameters())[:3]
        optimizer.synchronize()
        with torch.no_grad():
            first.mul_(0.5)
            second.data = second.detach() + 1
        if move:
            engine.moves.offload(MOVABLE, pages=HostPages.LOCKED)
        third.data = torch.full_like(third, 0.125)
        if move:
            engine.moves.reload()
        run(model, optimizer, steps=2)
        found = [value.clone() for value in model.state_dict().values()]
        optimizer.close()
        return found

    _same(_run(move=False), _run(move=True))


def test_deepspeeds_names():
    engine = engine_of({"zero_optimization": {"offload_optimizer": {"device": "none"}}})
    train(engine, 2)
    states = forebay.OffloadStateTypeEnum
    placed = engine.ledger.bytes(Tier.DEVICE)
    moved = engine.offload_states(include=[states.optim_states, "hp_params"], pin_memory=False)
    assert engine.ledger.bytes(Tier.DEVICE, Role.OPTIM_STATES) == 0
    assert moved.device_bytes == placed - engine.ledger.bytes(Tier.DEVICE)
    assert 0 < moved.moved_bytes <= moved.device_bytes  # each arena is whole pages
    assert engine.reload_states() == moved
    moved = engine.offload_states(device=forebay.OffloadDeviceEnum.cpu, non_blocking=True)
    assert moved.moved_bytes > 0
    assert moved.device_bytes is None
    engine.synchronize()
    assert engine.ledger.bytes(Tier.DEVICE) == 0
    engine.reload_states(non_blocking=True)
    train(engine, 1)
    with pytest.raises(ConfigError, match=r"optim_state'; valid are optim_states, hp_params"):
        engine.offload_states(include=["optim_state"])
    with pytest.raises(ConfigError, match="names 5; valid are optim_states"):
        engine.offload_states(include=5)
    for device in ("gpu", "none", None):
        with pytest.raises(ConfigError, match=f"names {device!r}; valid is cpu"):
            engine.offload_states(device=device)
    with pytest.raises(UnsupportedError, match="nvme"):
        engine.offload_states(device="nvme")
    assert {role.value for role in MOVABLE} == {state.value for state in states}
    engine.close()
