"""Memory holds as much state as fits: small units behind a large one, and pieces of a unit."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from forebay.engine import EngineOptions, offload_with
from forebay.engine.file_space import NvmeOptions
from forebay.plan import Lane, UpdatePlace
from forebay.plan.memory import buffer_bytes
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


def _read_bytes(model, optimizer):
    """Of the third step; what the program says, too."""
    engine = optimizer.engine
    _steps(model, optimizer, range(2))
    optimizer.synchronize()
    before = engine.traffic[Lane.READ]
    _steps(model, optimizer, [2])
    optimizer.synchronize()
    read = engine.traffic[Lane.READ] - before
    assert read == engine.program.traffic(Lane.READ)
    return read


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
def test_buffers_beyond_those_in_motion_hold_pieces_that_are_read_once(reads_ahead, tmp_path):
    read = {}
    for count in (4, 8, 16):
        model = _model(*[512] * 6)
        optimizer = _engine(model, tmp_path, buffer_count=count, reads_ahead=reads_ahead)
        held = optimizer.engine.placement.buffers.held
        read[held] = _read_bytes(model, optimizer)
        optimizer.close()
    assert list(read) == [0, 4, 8]
    # The first unit is two whole pieces and a bias in a third, the second four and a bias.
    assert read[0] - read[4] == read[4] - read[8] == 3 * 12 * BLOCK + 3 * 4096


def test_what_is_left_of_a_budget_holds_pieces_of_a_unit(tmp_path):
    model = _model(*[512] * 6)
    whole = _engine(model, tmp_path, buffer_count=4)
    taken = whole.engine.ledger.bytes(Tier.HOST)
    each = buffer_bytes(whole.engine.placement)
    all_read = _read_bytes(model, whole)
    whole.close()
    model = _model(*[512] * 6)
    some = _engine(model, tmp_path, host_budget=taken + each + 100, buffer_count=4)
    assert some.engine.placement.buffers.held == 1
    assert all(unit.placement.update is UpdatePlace.NVME for unit in some.engine.units)
    assert _read_bytes(model, some) == all_read - 12 * BLOCK
    some.close()


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
