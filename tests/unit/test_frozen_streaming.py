"""Frozen weights come and go with the trained ones: adapters on a model larger than the device."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import forebay
from forebay.engine import EngineOptions, offload_with
from forebay.errors import BudgetError, PendingWeightError, UnsupportedError
from forebay.links import FaultScript
from forebay.plan import Lane, UpdatePlace, WeightPlace, build_program
from forebay.plan.memory import forecast
from forebay.tiers.ledger import Role, Tier

AWAY = EngineOptions(device="cpu", weights=WeightPlace.HOST, update=UpdatePlace.HOST, pool_bytes=0)
LATE = replace(AWAY, fault=FaultScript(seed=2, max_delay_us=300), piece_elements=100)
RESIDENT = EngineOptions(device="cpu", update=UpdatePlace.DEVICE)
WIDTH = 32


class Adapted(nn.Module):
    """A frozen matrix and a trained adapter of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.base(x.bfloat16()).float() + self.up(self.down(x)))


class Model(nn.Module):
    def __init__(self, blocks: int = 6, kind: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, WIDTH).requires_grad_(requires_grad=False)
        self.blocks = nn.ModuleList(Adapted() for _ in range(blocks))
        self.kind = kind

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x) if self.kind is None else checkpoint(block, x, use_reentrant=self.kind)
        return x


def _offload(model: nn.Module, options: EngineOptions):
    trained = [param for param in model.parameters() if param.requires_grad]
    source = torch.optim.AdamW(trained, lr=1e-2)
    return offload_with(model, source, options=replace(options, clip_norm=1.0))[1]


def _step(model, optimizer, number: int) -> float:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _train(model: nn.Module, options: EngineOptions, steps: int = 4):
    optimizer = _offload(model, options)
    losses = [_step(model, optimizer, number) for number in range(steps)]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.engine.ledger.check()
    optimizer.close()
    return losses, weights


@pytest.mark.parametrize("kind", [None, False, True], ids=["stored", "non_reentrant", "reentrant"])
@pytest.mark.parametrize("options", [AWAY, LATE], ids=["least", "late"])
def test_same_bits(options, kind):
    # reentrant regions need an input with a gradient
    def model() -> Model:
        made = Model(kind=kind)
        if kind:
            made.embed.bias.requires_grad_(requires_grad=True)
        return made

    expected, seen = _train(model(), RESIDENT), _train(model(), options)
    assert seen[0] == expected[0]
    assert all(torch.equal(seen[1][name], value) for name, value in expected[1].items())
    before = Model().state_dict()
    assert all(
        torch.equal(value, before[name]) for name, value in seen[1].items() if "base" in name
    )


def test_a_copy_of_the_model_has_them_and_a_pickle_says_how():
    model = Model()
    optimizer = _offload(model, AWAY)
    _step(model, optimizer, 0)
    copied = copy.deepcopy(model)
    found = dict(copied.named_parameters())
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    with pytest.raises(PendingWeightError, match=r"deepcopy\(model\)"):
        pickle.dumps(model)
    again = pickle.loads(pickle.dumps(copied))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), found.values(), strict=True))
    optimizer.close()


def test_they_take_host_memory_and_a_pool_of_single_blocks():
    model = Model(blocks=12)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    optimizer = _offload(model, AWAY)
    engine = optimizer.engine
    assert engine.ledger.bytes(Tier.DEVICE) < frozen / 3
    on_host = engine.ledger.bytes(Tier.HOST, Role.LP_PARAMS)
    assert frozen <= on_host < frozen + 13 * 4096 * 2
    # no master, no moments, no gradients of them; fp32 adapters have 8 + 4 + 4
    assert engine.ledger.bytes(Tier.HOST) - on_host < 16 * trained + 13 * 4 * 4096
    said = forecast(engine.placement)
    assert said["host", "lp_params"] == on_host
    for number in range(3):
        _step(model, optimizer, number)
    pool = engine.streaming.residency.pool
    late = pool.late
    for number in range(3):
        _step(model, optimizer, number)
    assert pool.late == late  # a steady order is fetched ahead
    optimizer.close()
    assert not any(param.isnan().any() for param in model.parameters())


@pytest.mark.parametrize("kind", [None, False, True], ids=["stored", "non_reentrant", "reentrant"])
@pytest.mark.parametrize("pool_bytes", [0, 8192, 10400, 15600, 1 << 20])
def test_as_many_bytes_come_up_as_the_program_says(pool_bytes, kind):
    """A forward brings them and a backward again, less what stays: an update makes none stale."""
    model = Model(kind=kind)
    model.embed.bias.requires_grad_(requires_grad=bool(kind))
    optimizer = _offload(model, replace(AWAY, pool_bytes=pool_bytes))
    engine, seen = optimizer.engine, []
    for number in range(5):
        _step(model, optimizer, number)
        engine.synchronize()
        seen.append(engine.traffic[Lane.UP])
    assert seen[4] - seen[3] == seen[3] - seen[2] == engine.current_program().traffic(Lane.UP)
    optimizer.close()


@pytest.mark.parametrize("pool_bytes", [0, 8192])
def test_so_do_those_of_several_backwards_each_update(pool_bytes):
    model = Model()
    optimizer = _offload(model, replace(AWAY, pool_bytes=pool_bytes, backwards=3))
    engine, seen = optimizer.engine, []
    for _ in range(4):
        for number in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.synchronize()
        seen.append(engine.traffic[Lane.UP])
    assert seen[3] - seen[2] == seen[2] - seen[1] == engine.current_program().traffic(Lane.UP)
    optimizer.close()


def test_a_plan_without_a_run_expects_them_in_module_order():
    """What nothing is known of but the module tree: exact where a pool holds all or one block."""
    for pool_bytes in (0, 1 << 20):
        model = Model()
        optimizer = _offload(model, replace(AWAY, pool_bytes=pool_bytes))
        engine = optimizer.engine
        expected = build_program(engine.placement, order=engine.order)
        assert engine.order == (6, 7, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5)
        for number in range(4):
            _step(model, optimizer, number)
        assert expected.traffic(Lane.UP) == engine.current_program().traffic(Lane.UP)
        optimizer.close()


def test_a_device_too_small_for_a_block_is_refused_with_both_numbers():
    with pytest.raises(BudgetError, match=r"frozen[\s\S]*device_budget is 1\.0 KiB"):
        _offload(Model(), replace(AWAY, device_budget=1024))


def test_what_is_neither_trained_nor_a_weight_stays():
    model = Model(blocks=2)
    model.table = nn.Parameter(torch.arange(9, dtype=torch.int8), requires_grad=False)
    model.odd = nn.Parameter(torch.ones(3))  # needs a gradient and is in no group
    trained = [param for name, param in model.named_parameters() if "up" in name or "down" in name]
    source = torch.optim.AdamW(trained, lr=1e-2)
    _, optimizer = offload_with(model, source, options=AWAY)
    known = {id(record.param) for unit in optimizer.engine.frozen for record in unit.records}
    assert id(model.table) not in known
    assert id(model.odd) not in known
    assert model.odd.tolist() == [1, 1, 1]
    optimizer.close()


def test_reading_writing_and_loading_them():
    model, optimizer = Model(), None
    optimizer = _offload(model, AWAY)
    block = model.blocks[3]
    value = Model().blocks[3].base.weight
    assert torch.equal(block.base.weight, value)
    _step(model, optimizer, 0)
    with forebay.zero.GatheredParameters(block):
        assert torch.equal(block.base.weight, value)
        with torch.no_grad():
            block.base.weight.zero_()
    _step(model, optimizer, 1)
    assert not model.state_dict()["blocks.3.base.weight"].any()
    model.load_state_dict({**model.state_dict(), "blocks.3.base.weight": value})
    twin = Model()
    twin.load_state_dict(model.state_dict())
    x = torch.ones(1, 8)
    with torch.no_grad():
        assert torch.equal(model(x), twin(x))
    captured = next(iter(model.blocks[0].base.parameters()))
    optimizer.engine.streaming.residency.drop_all()
    with (
        pytest.raises(UnsupportedError, match="only its module can bring it"),
        forebay.zero.GatheredParameters([captured]),
    ):
        pass
    optimizer.close()


def test_checkpoints_hold_them_or_the_adapters_alone(tmp_path):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
            "stage3_max_live_parameters": 0,
        },
    }

    def _engine(model: nn.Module):
        return forebay.initialize(model=model, config=config)[0]

    def _train_on(engine, numbers) -> list[float]:
        found = []
        for number in numbers:
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
            loss = engine.backward(engine(x).square().mean())
            engine.step()
            found.append(loss.item())
        return found

    with _engine(Model()) as engine:
        assert engine.core.frozen
        _train_on(engine, range(2))
        engine.save_checkpoint(tmp_path / "whole")
        engine.save_checkpoint(tmp_path / "adapters", exclude_frozen_parameters=True)
        engine.save_16bit_model(tmp_path, "all.safetensors")
        expected = _train_on(engine, range(2, 5))
    other = Model()
    with torch.no_grad():
        for param in other.parameters():
            param.add_(1)
    with _engine(other) as engine:
        engine.load_checkpoint(tmp_path / "whole")
        assert _train_on(engine, range(2, 5)) == expected
    with _engine(Model()) as engine:
        engine.load_checkpoint(tmp_path / "adapters", load_module_strict=False)
        assert _train_on(engine, range(2, 5)) == expected
    saved = load_file(tmp_path / "all.safetensors")
    assert torch.equal(saved["blocks.1.base.weight"], Model().blocks[1].base.weight)
    assert not any(value.isnan().any() for value in saved.values())


def test_a_model_on_the_meta_device_is_read_straight_to_the_host(tmp_path):
    save_file(Model().state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Model()
    forebay.zero.weights_from(model, tmp_path)
    expected, seen = _train(Model(), RESIDENT), _train(model, AWAY)
    assert seen[0] == expected[0]
    assert not any(param.requires_grad for param in model.blocks[0].base.parameters())
