"""Budgets that hold too little, profiles of other machines, workers that fail: one clear error."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from compat_cases import engine_of, loss_of, same, small, train, weights
from forebay.engine import EngineOptions, offload_with
from forebay.engine.options import OverflowCheck
from forebay.errors import BudgetError, ConfigError, EngineClosedError, TransferError
from forebay.plan import UpdatePlace
from forebay.plan.placement import WeightPlace
from unit.engine_cases import adamw, batches, mlp, run
from unit.engine_cases import loss_of as plain_loss
from unit.engine_cases import weights as copies

pytestmark = pytest.mark.timeout(60)

HOST = EngineOptions(device="cpu")


def test_a_device_budget_below_the_weights():
    """Both numbers and a way out; the model is as it was and trains when the budget is raised."""
    model = small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(BudgetError, match=r"device_budget is 4\.0 KiB") as caught:
        engine_of({"forebay": {"device_budget": 4096}}, model=model)
    assert same(dict(model.state_dict()), before)
    (needed,) = re.findall(r"device_budget to (\w+)", str(caught.value.hint))
    with engine_of({"forebay": {"device_budget": needed}}, model=model) as engine:
        train(engine, 2)


def test_a_device_budget_below_the_largest_unit_of_weights_that_come_and_go():
    model = mlp(torch.bfloat16)
    options = replace(HOST, weights=WeightPlace.HOST, device_budget=512, unit_elements=1)
    with pytest.raises(BudgetError, match=r"\d+.*\d+") as caught:
        offload_with(model, adamw(model), options=options)
    assert "budget" in str(caught.value)
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_device_budget_without_room_for_a_visit():
    """Weights fit and no unit's state does: every unit updates on the host, to the same bits."""
    results = []
    for options in (
        HOST,
        replace(HOST, update=UpdatePlace.STREAMED, staging_bytes=64),
    ):
        model = mlp(torch.bfloat16)
        optimizer = offload_with(model, adamw(model), options=options)[1]
        run(model, optimizer, steps=4)
        results.append(copies(model))
        optimizer.close()
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())


@pytest.mark.parametrize("content", ["", "{", '{"version": 999}', "[]"])
def test_a_profile_that_is_none(tmp_path, content):
    path = tmp_path / "machine.json"
    path.write_text(content, encoding="utf-8")
    model = small()
    with pytest.raises(ConfigError, match=r"machine\.json") as caught:
        engine_of({"forebay": {"profile": str(path)}}, model=model)
    assert "forebay probe" in str(caught.value.hint)
    with engine_of(model=model) as engine:  # nothing was taken
        train(engine, 1)


class _DyingPool:
    """A pool whose workers are gone: whatever is asked of it fails."""

    def __init__(self, pool, *, after):
        self._pool = pool
        self._left = after

    def update(self, *arguments):
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("a worker thread died")
        return self._pool.update(*arguments)

    def __getattr__(self, name):
        return getattr(self._pool, name)


@pytest.mark.parametrize("overflow", OverflowCheck)
def test_a_worker_that_dies(overflow):
    """In step(), and in backward where updates run there: one error in the caller's thread."""
    model = mlp(torch.bfloat16)
    optimizer = offload_with(model, adamw(model), options=replace(HOST, overflow=overflow))[1]
    lanes = optimizer.engine.lanes
    lanes.pool = _DyingPool(lanes.pool, after=9)
    with pytest.raises(TransferError, match="a worker thread died"):
        for x in batches(8, torch.bfloat16):
            plain_loss(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(EngineClosedError):
        optimizer.step()
    with pytest.raises(EngineClosedError):
        model.state_dict()
    optimizer.close()
    assert all(p.isnan().all() for p in model.parameters())


def test_an_engine_that_failed_can_be_replaced():
    """The model is an ordinary one afterwards, into which a checkpoint can be loaded."""
    engine = engine_of()
    good = weights(engine)
    engine.core.lanes.pool = _DyingPool(engine.core.lanes.pool, after=0)
    model = engine.module
    with pytest.raises(TransferError, match="a worker thread died"):
        train(engine, 1)
    engine.close()
    model.load_state_dict(good)
    with engine_of(model=model) as again:
        train(again, 2)
        assert loss_of(model, torch.zeros(4, 7)).isfinite()
