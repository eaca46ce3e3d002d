"""Memory holds as much state as fits: small units behind a large one, and pieces of a unit."""

from __future__ import annotations

import itertools
import mmap

import pytest
import torch
from torch import nn

import forebay
from forebay import TransferError
from forebay.engine import EngineOptions, build, offload_with
from forebay.engine.file_space import NvmeOptions
from forebay.plan import Lane, UpdatePlace
from forebay.plan.memory import buffer_bytes, forecast, weight_staging_bytes
from forebay.plan.placement import WeightPlace
from forebay.tiers.ledger import Tier
from unit.engine_cases import loss_of, same, weights

BLOCK = 64 * 1024


def _model(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = itertools.pairwise((256, *widths))
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairs)).to(torch.bfloat16)


def _engine(model, path=None, *, host_budget=None, **buffers):
    nvme = None if path is None else NvmeOptions(paths=(path,), buffer_elements=BLOCK, **buffers)
    options = EngineOptions(device="cpu", threads=1, host_budget=host_budget, nvme=nvme)
    source = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return offload_with(model, source, options=options)[1]


def _steps(model, optimizer, numbers):
    for number in numbers:
        x = torch.randn(2, 256, generator=torch.Generator().manual_seed(number))
        loss_of(model, x.to(torch.bfloat16)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _file_bytes(model, optimizer):
    """Read and written by the third step, which is what the program says, and what files take."""
    engine = optimizer.engine
    _steps(model, optimizer, range(2))
    optimizer.synchronize()
    before = engine.traffic
    _steps(model, optimizer, [2])
    optimizer.synchronize()
    moved = [engine.traffic[lane] - before[lane] for lane in (Lane.READ, Lane.WRITE)]
    program = engine.current_program()
    assert moved == [program.traffic(lane) for lane in (Lane.READ, Lane.WRITE)]
    placed = {(row.tier.value, row.role.value): row.nbytes for row in engine.ledger.table()}
    assert placed == forecast(engine.placement, device_page_bytes=mmap.PAGESIZE)
    return *moved, engine.ledger.bytes(Tier.NVME)


@pytest.mark.parametrize("weights", [WeightPlace.DEVICE, WeightPlace.NVME])
def test_buffers_take_an_eighth_of_a_small_machine(monkeypatch, tmp_path, weights):
    """Nobody says a budget or a size: 48 MiB each at most, where 2 Mi elements a piece take 112."""
    machine = 384 << 20
    monkeypatch.setattr(build, "machine_bytes", lambda: machine)
    model = nn.Sequential(*(nn.Linear(1024, 2048) for _ in range(4))).to(torch.bfloat16)
    nvme = NvmeOptions(paths=(tmp_path,))
    options = EngineOptions(device="cpu", threads=1, nvme=nvme, weights=weights, pool_bytes=0)
    optimizer = offload_with(model, torch.optim.AdamW(model.parameters()), options=options)[1]
    placement = optimizer.engine.placement
    taken = placement.buffers.count * buffer_bytes(placement) + weight_staging_bytes(placement)
    optimizer.close()
    assert 0 < taken <= machine // 8 * (1 if weights is WeightPlace.DEVICE else 2)


def test_small_units_stay_in_memory_behind_one_that_is_too_large(tmp_path):
    model = _model(2048, 256, 256, 256, 256)
    optimizer = _engine(model, tmp_path, host_budget=13_000_000, buffer_count=4)
    places = [unit.placement.update for unit in optimizer.engine.units]
    assert places[0] is UpdatePlace.NVME
    assert UpdatePlace.HOST in places[1:]
    left = 13_000_000 - optimizer.engine.ledger.bytes(Tier.HOST)
    assert left < buffer_bytes(optimizer.engine.placement)  # not even one more piece
    optimizer.close()


@pytest.mark.parametrize("reads_ahead", [True, False])
def test_buffers_beyond_those_in_motion_hold_pieces_that_are_in_no_file(reads_ahead, tmp_path):
    moved = {}
    for count in (4, 8, 16):
        model = _model(*[512] * 6)
        optimizer = _engine(model, tmp_path, buffer_count=count, reads_ahead=reads_ahead)
        held = optimizer.engine.placement.buffers.held
        moved[held] = _file_bytes(model, optimizer)
        optimizer.close()
    assert list(moved) == [0, 4, 8]
    # The first unit is two whole pieces and a bias in a third, the second four and a bias.
    fewer = 3 * 12 * BLOCK + 3 * 4096
    for some, more in itertools.pairwise(moved.values()):
        assert [a - b for a, b in zip(some, more, strict=True)] == [fewer] * 3


def test_what_is_left_of_a_budget_holds_pieces_of_a_unit(tmp_path):
    model = _model(*[512] * 6)
    whole = _engine(model, tmp_path, buffer_count=4)
    taken = whole.engine.ledger.bytes(Tier.HOST)
    each = buffer_bytes(whole.engine.placement)
    all_moved = _file_bytes(model, whole)
    whole.close()
    model = _model(*[512] * 6)
    some = _engine(model, tmp_path, host_budget=taken + each + 100, buffer_count=4)
    assert some.engine.placement.buffers.held == 1
    assert all(unit.placement.update is UpdatePlace.NVME for unit in some.engine.units)
    assert some.engine.ledger.bytes(Tier.HOST) == taken + each
    assert _file_bytes(model, some) == tuple(nbytes - 12 * BLOCK for nbytes in all_moved)
    some.close()


def test_more_buffers_than_are_needed_refuse_no_budget_that_fits_everything(tmp_path):
    optimizer = _engine(_model(512, 512), tmp_path, host_budget=1 << 30, buffer_count=9)
    assert {u.placement.update for u in optimizer.engine.units} == {UpdatePlace.HOST}
    assert optimizer.engine.ledger.bytes(Tier.NVME) == 0
    optimizer.close()


def test_a_small_piece_takes_what_it_has_and_no_whole_buffer(tmp_path):
    taken = {}
    for count in (4, 8):
        optimizer = _engine(_model(*[512] * 6), tmp_path, buffer_count=count)
        taken[count] = optimizer.engine.ledger.bytes(Tier.HOST)
        each = buffer_bytes(optimizer.engine.placement)
        optimizer.close()
    # Of the four that are held one has 512 elements, in three roles and as new weights.
    assert taken[8] - taken[4] == 3 * each + 4 * 4096


def test_pieces_that_are_held_are_what_a_user_loads(tmp_path):
    found = []
    for path in (None, tmp_path):
        model = _model(*[512] * 3)
        optimizer = _engine(model, path, **({} if path is None else {"buffer_count": 12}))
        _steps(model, optimizer, range(3))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, state)
        _steps(model, optimizer, range(3, 5))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        _steps(model, optimizer, range(5, 7))
        found.append(weights(model))
        optimizer.close()
    assert same(*found)


def _trained(folder, *, held, beside=False):
    """An engine with four pieces in motion and so many held; of the twelve that there are."""
    nvme = {"device": "nvme", "nvme_path": str(folder), "buffer_size": BLOCK}
    config = {
        "train_batch_size": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "checkpoint": {"writer": {"decoupled": beside}},
        "zero_optimization": {"stage": 2},
    }
    if held is not None:
        config["zero_optimization"]["offload_optimizer"] = {**nvme, "buffer_count": 4 + held}
    engine = forebay.initialize(model=_model(*[512] * 3), config=config)[0]
    assert engine.core.placement.buffers.held == (held or 0)
    return engine


def _updates(engine, numbers):
    for number in numbers:
        x = torch.randn(2, 256, generator=torch.Generator().manual_seed(number))
        engine.backward(loss_of(engine, x.to(torch.bfloat16)))
        engine.step()


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(("first", "second"), [(4, None), (None, 4), (4, 0), (4, 4)])
def test_checkpoints_have_the_pieces_that_are_in_no_file(first, second, beside, tmp_path):
    plain = _trained(tmp_path, held=None)
    _updates(plain, range(5))
    begun = _trained(tmp_path, held=first, beside=beside)
    _updates(begun, range(2))
    begun.save_checkpoint(str(tmp_path / "saved"))
    _updates(begun, range(2, 5))  # while the checkpoint is written
    begun.wait_for_checkpoint()
    assert same(weights(plain.module), weights(begun.module))
    begun.close()
    rest = _trained(tmp_path, held=second)
    rest.load_checkpoint(str(tmp_path / "saved"))
    _updates(rest, range(2, 5))
    assert same(weights(plain.module), weights(rest.module))
    plain.close()
    rest.close()


def test_values_written_between_steps_reach_pieces_in_memory(tmp_path):
    found = []
    for held in (None, 4):
        engine = _trained(tmp_path, held=held)
        _updates(engine, range(2))
        weight = engine.module[0].weight
        forebay.utils.safe_set_full_fp32_param(weight, torch.full(weight.shape, 0.25))
        state = forebay.utils.safe_get_full_optimizer_state(weight, "exp_avg")
        forebay.utils.safe_set_full_optimizer_state(weight, state * 0.5, "exp_avg")
        _updates(engine, range(2, 4))
        found.append(weights(engine.module))
        engine.close()
    assert same(*found)


def test_a_byte_of_memory_that_changed_is_found_and_named(tmp_path):
    engine = _trained(tmp_path, held=4)
    _updates(engine, range(2))
    engine.synchronize()
    state = engine.core.units[0].parts[0].files
    state._held.role(0, 1, first=0, last=10)[3] += 1.0
    with pytest.raises(TransferError, match=r"exp_avg of 0\.weight is not what was written"):
        _updates(engine, [2])
        engine.synchronize()
    engine.close()


@pytest.mark.parametrize(
    ("given", "budget", "rows"),
    [
        (
            {},
            None,
            {
                "offload_optimizer.buffer_count": ("4", "default", ""),
                "offload_optimizer.buffer_size": (
                    "4194304 elements (48.0 MiB of state)",
                    "derived",
                    "as host memory allows, at most 4 Mi",
                ),
                "offload_param.buffer_size": (
                    "4194304 elements (8.0 MiB in bfloat16)",
                    "derived",
                    "as host memory allows, at most 4 Mi",
                ),
            },
        ),
        (
            {"buffer_count": 9, "buffer_size": 100_000},
            None,
            {
                "offload_optimizer.buffer_count": (
                    "9",
                    "given",
                    "4 let pieces come and go, 5 pieces stay in memory",
                ),
                "offload_optimizer.buffer_size": (
                    "100000 elements (1.1 MiB of state)",
                    "given",
                    "in use: 65536 elements (768.0 KiB of state)",
                ),
                "offload_param.buffer_size": (
                    "65536 elements (128.0 KiB in bfloat16)",
                    "derived",
                    "as host memory allows, at most 4 Mi",
                ),
            },
        ),
        (
            {"buffer_count": 9},
            "1GiB",
            {
                f"{section}.{name}": (value, source, "changes nothing: all of it is in memory")
                for section, name, value, source in (
                    ("offload_optimizer", "buffer_count", "9", "given"),
                    ("offload_optimizer", "buffer_size", "null", "default"),
                    ("offload_param", "buffer_count", "5", "default"),
                    ("offload_param", "buffer_size", "null", "default"),
                )
            },
        ),
    ],
    ids=["default", "given", "all_fits"],
)
def test_the_printed_configuration_says_what_is_in_use(given, budget, rows, tmp_path):
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path), **given},
        "offload_param": {"device": "nvme", "max_in_cpu": 0},
    }
    config = {
        "train_batch_size": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        "forebay": {"host_budget": budget},
    }
    engine = forebay.initialize(model=_model(*[512] * 6), config=config)[0]
    found = {
        row.path.removeprefix("zero_optimization."): (row.value, row.source.value, row.note)
        for row in engine.config.describe()
    }
    engine.close()
    assert {path: found[path] for path in rows} == rows
