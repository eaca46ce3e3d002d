"""What checkpointing keeps travels to the host and back, and nothing else changes."""

from __future__ import annotations

import functools
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from forebay.engine import EngineOptions, offload_with
from forebay.engine.layer_order import LayerOrder
from forebay.engine.options import ActivationPlace
from forebay.errors import ForebayWarning
from forebay.links import FaultScript
from forebay.plan import UpdatePlace, WeightPlace
from forebay.plan.placement import AccumulationOrder
from forebay.tiers.ledger import Role, Tier
from numerics.real_models import DEVICE, Job, by_offload, by_streaming
from numerics.training import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
KINDS = {"reentrant": True, "non_reentrant": False}
DOWN = EngineOptions(update=UpdatePlace.HOST, activations=ActivationPlace.HOST)
# Longer than a block computes: what is brought up two ahead would be there anyway after less.
LATE = FaultScript(seed=7, max_delay_us=20_000)
AWAY = {
    "activations": replace(DOWN, fault=LATE),
    "both": replace(DOWN, weights=WeightPlace.HOST, pool_bytes=0, fault=LATE),
}


@functools.cache
def _resident(job: Job):
    torch.use_deterministic_algorithms(True)
    try:
        return by_offload(job, place=UpdatePlace.DEVICE)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["tied_llama", "mixtral", "transformer"])
def test_same_bits(model, kind):
    job = Job(model, dtype=torch.bfloat16, micro=2, checkpoints=kind)
    expected = _resident(job)
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_bits(expected, by_streaming(job, options=AWAY["both"]))
    finally:
        torch.use_deterministic_algorithms(False)


class _Deep(nn.Module):
    def __init__(self, kind: bool, blocks: int, skips: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.skips = skips
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            made = torch.tanh(checkpoint(block, x, use_reentrant=self.kind))
            x = x + made if self.skips else made
        return x


def _train(kind: bool, options: EngineOptions, *, rows: int = 16):
    model = _Deep(kind, 6).to(DEVICE)
    _, optimizer = offload_with(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        options=replace(options, device=DEVICE),
    )
    losses, engine = [], optimizer.engine
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(rows + step % 2, 32, generator=generator).to(DEVICE).requires_grad_()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses.append(model(x).sum().item())
        model.train()
    engine.synchronize()
    engine.ledger.check()
    store = engine.streaming.activations
    held = engine.ledger.bytes(Tier.HOST, Role.ACTIVATIONS)
    optimizer.close()
    return losses, 0 if store is None else store.nbytes, held, engine


@pytest.mark.parametrize("away", AWAY)
@pytest.mark.parametrize("kind", KINDS)
def test_the_inputs_of_all_regions_but_the_last_travel(kind, away):
    expected, none, _, _ = _train(KINDS[kind], EngineOptions(update=UpdatePlace.DEVICE))
    losses, moved, held, engine = _train(KINDS[kind], AWAY[away])
    assert none == 0
    assert losses == expected
    # five of six inputs, each step
    assert moved == sum(5 * (16 + step % 2) * 32 * 4 for step in range(5))
    page = 4096
    assert 5 * 16 * 32 * 4 <= held <= 6 * page
    assert engine.ledger.bytes(Tier.HOST, Role.ACTIVATIONS) == 0


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_forwards_without_gradients_change_nothing(kind):
    """In training mode, between forward and backward and between steps."""

    def _gradients(*, disturbed: bool):
        model = _Deep(kind, 6).to(DEVICE)
        source = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options = replace(AWAY["activations"], device=DEVICE)
        _, optimizer = offload_with(model, source, options=options)
        found = []
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(16, 32, generator=generator).to(DEVICE).requires_grad_()
            loss = model(x).pow(2).mean()
            if disturbed:
                with torch.no_grad():
                    model(torch.ones_like(x))
            loss.backward()
            found += [x.grad, *(p.grad.clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
            if disturbed:
                with torch.no_grad():
                    model(torch.ones_like(x))
        moved = optimizer.engine.streaming.activations.nbytes
        optimizer.close()
        return found, moved

    plain, plain_bytes = _gradients(disturbed=False)
    found, moved = _gradients(disturbed=True)
    assert len(plain) == len(found)
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))
    assert moved == plain_bytes


@pytest.mark.parametrize("is_checkpointed", [True, False])
def test_what_cannot_act_is_said_once(is_checkpointed, recwarn):
    model = _Deep(kind=False, blocks=2).to(DEVICE) if is_checkpointed else nn.Linear(32, 32)
    source = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _, optimizer = offload_with(model, source, options=replace(DOWN, device=DEVICE))
    for _ in range(2):
        model(torch.ones(16, 32, device=DEVICE)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    said = [str(one.message) for one in recwarn if one.category is ForebayWarning]
    assert len(said) == (not is_checkpointed)
    assert all("no part of the model is checkpointed" in one for one in said)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_that_is_kept_or_dropped(kind):
    model = _Deep(KINDS[kind], 6).to(DEVICE)
    _, optimizer = offload_with(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        options=replace(AWAY["activations"], device=DEVICE),
    )
    x = torch.ones(16, 32, device=DEVICE, requires_grad=True)
    model(x).sum()  # no backward follows
    if kind == "non_reentrant":
        loss = model(x).pow(2).mean()
        first = torch.autograd.grad(loss, x, retain_graph=True)[0]
        second = torch.autograd.grad(loss, x)[0]
        assert torch.equal(first, second)
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.close()
    assert optimizer.engine.ledger.bytes(Tier.HOST, Role.ACTIVATIONS) == 0


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_came_back_goes_when_its_block_is_done(kind):
    """With all state on the device no gradient leaves, which would tidy up behind it."""
    model = _Deep(kind, 8, skips=False).to(DEVICE)
    options = replace(DOWN, device=DEVICE, update=UpdatePlace.DEVICE)
    _, optimizer = offload_with(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), options=options
    )
    store = optimizer.engine.streaming.activations
    give, given, alive = store.give, [], []

    def _give(kept):
        found = give(kept)
        given.append(weakref.ref(found))
        alive.append(sum(one() is not None for one in given))
        return found

    store.give = _give
    model(torch.randn(16, 32).to(DEVICE).requires_grad_()).pow(2).mean().backward()
    assert len(alive) == 8
    assert max(alive) <= 3
    optimizer.close()


def test_layer_order_asks_in_an_order_of_its_own_and_finds_it_on_its_way():
    """From the second window on nothing is brought up only when it is asked for."""
    model = _Deep(kind=False, blocks=6, skips=False).to(DEVICE)
    source = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = replace(DOWN, device=DEVICE, backwards=3, order=AccumulationOrder.LAYER)
    _, optimizer = offload_with(model, source, options=options)
    store, layers = optimizer.engine.streaming.activations, LayerOrder(optimizer.engine)
    late, give = [], store.give

    def _give(kept):
        late.append(kept.tensor is None and kept.up is None)
        return give(kept)

    store.give = _give
    rows = [torch.full((16, 32), 0.1 * number, device=DEVICE) for number in range(3)]
    counts = []
    for _ in range(3):
        late.clear()
        layers.backward([lambda x=x: model(x.requires_grad_()).pow(2).mean() for x in rows])
        optimizer.step()
        optimizer.zero_grad()
        counts.append(sum(late))
    assert counts[0] > 3
    assert max(counts[1:]) <= 1  # the first one: nobody was asked for anything before
    optimizer.close()
