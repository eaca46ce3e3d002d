"""All weights on the device for a while: brought once, as far as the device's budget has room."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import forebay
from forebay.errors import BudgetError
from forebay.tiers.ledger import Tier
from unit.engine_cases import offloaded, same, weights
from unit.streaming_cases import AWAY, BLOCK, RESIDENT, deep, inputs, step
from unit.test_frozen_streaming import AWAY as FROZEN_AWAY
from unit.test_frozen_streaming import Model, _offload


def test_forwards_in_a_window_on_all_weights_fetch_nothing():
    """As for each token that is generated; the pool itself has room for two of six blocks."""
    model, twin = deep(), deep()
    with offloaded(model, AWAY) as optimizer, offloaded(twin, RESIDENT) as other:
        pool, ledger = optimizer.engine.streaming.residency.pool, optimizer.engine.ledger
        for x in inputs(4):
            assert step(model, optimizer, x) == step(twin, other, x)
            before = (pool.capacity_bytes, ledger.bytes(Tier.DEVICE))
            assert before[0] < 6 * BLOCK
            brought = pool.brought_bytes
            with forebay.zero.GatheredParameters(model.parameters()), torch.no_grad():
                assert pool.brought_bytes - brought <= 6 * BLOCK
                brought = pool.brought_bytes
                found = [model(token) for token in inputs(3)]
                assert pool.brought_bytes == brought
                assert ledger.bytes(Tier.DEVICE) > before[1]
            assert (pool.capacity_bytes, ledger.bytes(Tier.DEVICE)) == before
            assert pool.used_bytes <= pool.capacity_bytes
            with torch.no_grad():
                assert all(torch.equal(a, twin(b)) for a, b in zip(found, inputs(3), strict=True))
        assert same(weights(model), weights(twin))


def test_frozen_weights_are_shown_too():
    model = Model()
    optimizer = _offload(model, FROZEN_AWAY)
    pool = optimizer.engine.streaming.residency.pool
    with forebay.zero.GatheredParameters(model), torch.no_grad():
        brought = pool.brought_bytes
        for _ in range(3):
            model(torch.ones(1, 8))
        assert pool.brought_bytes == brought
    assert pool.used_bytes <= pool.capacity_bytes
    optimizer.close()


def test_what_is_written_in_a_window_is_kept_though_its_room_goes():
    model = deep()
    with offloaded(model, AWAY) as optimizer:
        with forebay.zero.GatheredParameters(model.parameters()), torch.no_grad():
            for param in model.parameters():
                param.fill_(0.25)
        assert all((value == 0.25).all() for value in model.state_dict().values())
        step(model, optimizer, inputs(1)[0])


def test_a_window_that_the_budget_has_no_room_for_is_refused_before_anything_moves():
    model = deep()
    with offloaded(deep(), AWAY) as optimizer:
        least = optimizer.engine.ledger.bytes(Tier.DEVICE)
    with offloaded(model, replace(AWAY, device_budget=least)) as optimizer:
        step(model, optimizer, inputs(1)[0])
        optimizer.synchronize()
        pool = optimizer.engine.streaming.residency.pool
        before = (pool.brought_bytes, pool.here, pool.capacity_bytes)
        window = forebay.zero.GatheredParameters(model.parameters())
        with pytest.raises(BudgetError, match="weights that are shown together"), window:
            pass
        assert (pool.brought_bytes, pool.here, pool.capacity_bytes) == before
        step(model, optimizer, inputs(1)[0])
