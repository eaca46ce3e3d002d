"""Weights that live on the host: who reads and writes them, what they cost, what is refused."""

from __future__ import annotations

import copy
import gc
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import forebay
from forebay.engine import offload_with
from forebay.engine.forward_cost import ForwardCost
from forebay.errors import (
    BudgetError,
    PendingWeightError,
)
from forebay.observe.breakdown import break_down
from forebay.observe.recording import record
from forebay.plan import Lane, WeightPlace
from forebay.tiers.ledger import Role, Tier
from unit.engine_cases import adamw, loss_of, offloaded, run, same, weights
from unit.streaming_cases import AWAY, BLOCK, RESIDENT, deep, inputs, no_hooks_are_left, step


@pytest.mark.parametrize("blocks_in_pool", [2, 3, 6])
@pytest.mark.parametrize("micro", [1, 3])
def test_bytes_up_per_update(blocks_in_pool, micro):
    """2 bytes per parameter and pass, less what stays across the turns; never a second time."""
    model = deep()
    options = replace(AWAY, pool_bytes=blocks_in_pool * BLOCK, backwards=micro)
    with offloaded(model, options) as optimizer:
        engine = optimizer.engine
        seen = []
        for _ in range(4):
            engine.synchronize()
            before = sum(engine.traffic.values()), engine.traffic
            run(model, optimizer, steps=1, micro=micro, features=12)
            engine.synchronize()
            after = engine.traffic
            seen.append({lane.value: after[lane] - before[1][lane] for lane in after})
        item, block = 2, 12 * 12 + 12
        # The first forward loads all; a backward and each later forward all but what stayed. The
        # last backward has no use for the first block's weight, since the input needs no gradient.
        turned = 6 - blocks_in_pool
        blocks_up = 6 + turned + (micro - 1) * 2 * turned - (turned > 0)
        assert engine.current_program().traffic(Lane.UP) == item * block * blocks_up
        assert [one["up"] for one in seen[1:]] == [item * block * blocks_up] * 3
        assert seen[-1]["down"] == item * 6 * block * micro
        pool = engine.streaming.residency.pool
        uses, late = pool.uses, pool.late
        run(model, optimizer, steps=2, micro=micro, features=12)
        assert pool.uses > uses
        assert pool.late == late, "a steady order is known ahead"


def test_the_breakdown_shows_how_much_was_fetched_in_time():
    model = deep()
    with offloaded(model, replace(AWAY, pool_bytes=2 * BLOCK)) as optimizer:
        run(model, optimizer, steps=2, features=12)
        with record(optimizer.engine) as recording:
            run(model, optimizer, steps=3, features=12)
        # 6 uses in a forward, 5 in a backward, whose last block needs no weight
        counts = [(one.weights_in_time, one.weights_late) for one in recording.records]
        assert counts == [(11, 0)] * 3
        assert "weights in time: 100.0% of 11" in break_down(recording.records[1]).line("step")
        # another order: the blocks the other way round
        order = list(model)
        with record(optimizer.engine) as recording:
            x = inputs(1)[0]
            for layer in (*order[10:], *order[:2]):
                x = layer(x)
            x.float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert sum(one.weights_late for one in recording.records) > 0


def test_device_budget_is_kept():
    model = deep()
    budget = 3 * BLOCK
    options = replace(AWAY, pool_bytes=None, device_budget=budget)
    with offloaded(model, options) as optimizer:
        ledger = optimizer.engine.ledger
        sizes = []
        for unit in optimizer.engine.units:
            for part in unit.parts:
                fill = part.home.fill

                def _counting(fill=fill):
                    fill()
                    sizes.append(
                        sum(
                            storage.nbytes()
                            for other in optimizer.engine.units
                            for piece in other.parts
                            for storage in piece.home.storages
                        )
                    )

                part.home.fill = _counting
        run(model, optimizer, features=12)
        assert sizes
        assert max(sizes) <= budget
        assert ledger.peak_bytes(Tier.DEVICE) <= budget
        assert ledger.bytes(Tier.DEVICE, Role.LP_PARAMS) == budget
        ledger.check()
    assert ledger.bytes(Tier.DEVICE) == 0


def test_a_unit_larger_than_the_budget_is_refused_with_both_numbers():
    model = deep()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(BudgetError) as caught:
        offload_with(model, adamw(model), options=replace(AWAY, device_budget=1000))
    assert re.search(r"1\.0 KiB of weights of unit \d+:", caught.value.message)
    assert "device_budget is 1000 B" in caught.value.message
    assert "forebay.device_budget to 1KiB" in caught.value.hint
    assert same(before, dict(model.state_dict()))


def test_units_that_are_used_together_must_fit_together():
    """A parameter of the root is held while every block computes."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(12, dtype=torch.bfloat16))
            self.blocks = deep()

        def forward(self, x):
            return self.blocks(x * self.scale)

    model = Root()
    with pytest.raises(BudgetError, match="2 units that are used at the same time"):
        offload_with(model, adamw(model), options=replace(AWAY, device_budget=BLOCK))
    with offloaded(model, replace(AWAY, device_budget=BLOCK + 512)) as optimizer:
        run(model, optimizer, features=12)


def test_host_memory_is_that_of_resident_weights():
    """14 bytes per parameter: the high half of the master is the weight, no second copy."""
    rows = []
    for weight_place in WeightPlace:
        model = deep()
        with offloaded(model, replace(AWAY, weights=weight_place)) as optimizer:
            table = optimizer.engine.ledger.table()
            rows.append({row for row in table if row.tier is Tier.HOST})
    assert rows[0] == rows[1]


def test_state_dict_refers_to_the_host_and_loads_in_place():
    model, twin = deep(), deep()
    with offloaded(model, AWAY) as optimizer, offloaded(twin, RESIDENT) as other:
        run(model, optimizer, features=12)
        run(twin, other, features=12)
        state = model.state_dict()
        assert same(state, weights(twin))
        stored = {r.label: r.part.stored(r.slot) for r in optimizer.engine.collector.records}
        assert all(value.data_ptr() == stored[name].data_ptr() for name, value in state.items())
        for value in state.values():
            assert value.untyped_storage().nbytes() == value.nbytes
        changed = {name: value * 0.5 for name, value in state.items()}
        for one in (model, twin):
            one.load_state_dict(changed)
        assert run(model, optimizer, features=12) == run(twin, other, features=12)
        assert same(weights(model), weights(twin))


def test_a_weight_read_through_its_module_is_the_newest():
    model, twin = deep(), deep()
    with offloaded(model, AWAY) as optimizer, offloaded(twin, RESIDENT) as other:
        for x in inputs(3):
            assert step(model, optimizer, x) == step(twin, other, x)
            for index in range(0, 12, 2):
                assert torch.equal(model[index].weight, twin[index].weight)


def test_weights_that_the_user_writes_or_assigns_are_trained_on():
    model, twin = deep(), deep()
    with offloaded(model, AWAY) as optimizer, offloaded(twin, RESIDENT) as other:
        for turn, x in enumerate(inputs(6)):
            for one, its in ((model, optimizer), (twin, other)):
                if turn == 1:  # into what is on the device now
                    with torch.no_grad():
                        one[0].weight.mul_(0.5)
                if turn == 2:  # while it is away
                    one[8].weight.data = torch.full_like(one[8].weight, 0.1)
                if turn == 3:
                    with forebay.zero.GatheredParameters(one[4].weight):
                        nn.init.constant_(one[4].weight, 0.2)
                if turn == 4:
                    its.engine.synchronize()
            assert step(model, optimizer, x) == step(twin, other, x)
        assert same(weights(model), weights(twin))


def _with_penalty(model, x) -> torch.Tensor:
    return loss_of(model, x) + sum(p.float().square().sum() for p in model.parameters())


def test_steps_that_a_penalty_over_all_weights_spoils_say_why(caplog):
    """Iterating shows nothing; each loss is NaN then, and each step skipped; said once."""
    model = deep()
    with offloaded(model, AWAY) as optimizer:
        for x in inputs(2):
            _with_penalty(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            said = [r.message for r in caplog.records if "GatheredParameters" in r.message]
            assert len(said) == 1
    model = deep()
    with offloaded(model, replace(AWAY, pool_bytes=6 * BLOCK)) as optimizer:
        with forebay.zero.GatheredParameters(model.parameters()):
            _with_penalty(model, inputs(1)[0]).backward()
        optimizer.step()
        assert optimizer.engine.last_outcome.applied


def test_a_captured_weight_is_refused_by_name():
    """It was not asked for through its module, so nobody knew that it was to be read."""
    model = deep()
    captured = list(model.parameters())[4]
    with offloaded(model, AWAY):
        with pytest.raises(PendingWeightError, match=r"4\.weight") as caught:
            (captured.float() * 2).sum().backward()
        assert "register_external_parameter" in caught.value.hint


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_declared_weight_may_be_captured(when):
    class Reader(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.captured = [inner[8].weight]

        def forward(self, x):
            return self.inner(x) @ self.captured[0]

    model, twin = Reader(deep()), Reader(deep())
    if when == "before":
        forebay.zero.register_external_parameter(model, model.captured[0])
    with offloaded(model, AWAY) as optimizer, offloaded(twin, RESIDENT) as other:
        if when == "after":
            forebay.zero.register_external_parameter(model, model.captured[0])
        for x in inputs(3):
            assert step(model, optimizer, x) == step(twin, other, x)


def test_filling_what_is_away_is_refused():
    model = deep()
    param = list(model.parameters())[8]
    with offloaded(model, AWAY) as optimizer:
        run(model, optimizer, features=12)
        with torch.no_grad():
            param.fill_(3.0)
        with pytest.raises(PendingWeightError, match=r"8\.weight was written.*") as caught:
            model(inputs(1)[0])
        assert "inside forebay.zero.GatheredParameters" in caught.value.hint
        optimizer.synchronize()  # which brings nothing that lives on the host
        with forebay.zero.GatheredParameters(param), torch.no_grad():
            param.fill_(3.0)
        model(inputs(1)[0])
        assert bool((model.state_dict()["8.weight"] == 3.0).all())


def test_a_weight_changed_after_forward_fails_as_in_torch():
    for options in (AWAY, RESIDENT):
        model = deep()
        with offloaded(model, options):
            loss = loss_of(model, inputs(1)[0])
            with torch.no_grad():
                model[10].weight.add_(1.0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_an_activation_changed_after_forward_fails_as_in_torch():
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(12, 12)

        def forward(self, x):
            y = torch.tanh(self.lin(x))
            z = y * y
            y.add_(1.0)
            return z

    model = Careless()
    with offloaded(model, AWAY):
        out = model(torch.randn(3, 12))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_copies_of_the_model_have_the_newest_weights_and_no_hooks():
    model, twin = deep(), deep()
    with offloaded(model, AWAY) as optimizer, offloaded(twin, RESIDENT) as other:
        run(model, optimizer, features=12)
        run(twin, other, features=12)
        copied = copy.deepcopy(model)
        assert same(dict(copied.state_dict()), weights(twin))
        x = inputs(1)[0]
        assert torch.equal(copied(x), twin(x))
        run(model, optimizer, features=12)
        assert torch.equal(copied(x), twin(x))


def test_after_closing_the_model_is_an_ordinary_one_on_the_host():
    model, twin = deep(), deep()
    with offloaded(model, AWAY) as optimizer, offloaded(twin, RESIDENT) as other:
        run(model, optimizer, features=12)
        run(twin, other, features=12)
    x = inputs(1)[0]
    assert torch.equal(model(x), twin(x))
    assert type(model[0]._parameters) is dict
    assert no_hooks_are_left()


def test_closing_gives_the_pool_back_at_once():
    """Not when the garbage collector finds the engine: its memory is wanted before."""
    model = deep()
    gc.disable()
    try:
        with offloaded(model, replace(AWAY, pool_bytes=None)) as optimizer:
            step(model, optimizer, inputs(1)[0])
            homes = [part.home for unit in optimizer.engine.units for part in unit.parts]
            model(inputs(1)[0])
            assert sum(storage.nbytes() for home in homes for storage in home.storages) > BLOCK
            left = [StorageWeakRef(storage) for home in homes for storage in home.storages]
        assert all(storage.expired() for storage in left)
    finally:
        gc.enable()


def test_what_was_made_of_weights_outlives_closing():
    """A view of a weight on the device shows after closing what it showed before."""
    model = deep()
    with offloaded(model, replace(AWAY, pool_bytes=None)) as optimizer:
        step(model, optimizer, inputs(1)[0])
        model(inputs(1)[0])
        view = model[0].weight.detach().t()
        expected = view.clone()
    assert torch.equal(view, expected)


def test_forwards_without_gradients_say_what_they_cost(caplog):
    """All blocks but those that the pool keeps, for each forward; training forwards say nothing."""
    caplog.set_level("INFO", logger="forebay")
    model = deep()
    with offloaded(model, AWAY) as optimizer:
        for x in inputs(2):
            step(model, optimizer, x)
        assert "without gradients" not in caplog.text
        optimizer.synchronize()
        model.eval()
        with torch.no_grad():
            for x in inputs(4):
                model(x)
        assert "without gradients" not in caplog.text  # more may come
        model.train()
        before = optimizer.engine.streaming.residency.pool.brought_bytes
        step(model, optimizer, inputs(1)[0])
        (said,) = [r.message for r in caplog.records if "without gradients" in r.message]
        assert said.startswith("4 forwards without gradients brought ")
        assert before > 0
        with torch.no_grad():
            model(inputs(1)[0])
    last = [r.message for r in caplog.records if "without gradients" in r.message][-1]
    assert last.startswith("1 forward without gradients brought ")


def test_forwards_whose_weights_had_stayed_say_nothing(caplog):
    caplog.set_level("INFO", logger="forebay")
    cost = ForwardCost()
    cost.begins(100)
    cost.over(100)
    assert not caplog.text
    cost.begins(100)
    cost.over(300)
    assert "1 forward without gradients brought 200 B" in caplog.text
