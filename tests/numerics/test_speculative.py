"""Speculative updates: the bits of the exact ones, whether they are taken or made in vain."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from forebay.engine import EngineOptions, offload_with
from forebay.engine.options import SumPlace
from forebay.engine.policies import speculative, trial
from forebay.engine.policies.speculative import SpeculativeUpdates
from forebay.engine.policies.trial import Trial
from forebay.links import FaultScript
from forebay.plan import SixteenBitMaster
from forebay.plan.policies import Speculative
from numerics.test_exactness import DEVICES, DTYPES, ONE_DTYPE_FIRST, PLACES
from numerics.training import CLIP, Recipe, assert_same_bits, optimizer_for, reference, train

pytestmark = pytest.mark.usefixtures("deterministic")

# Never pauses: both ways out are gone through.
ALWAYS = Speculative(most_discarded=1.0)
RARELY = 20.0
SLOW = pytest.mark.slow
QUICK = {"host", "whole_masters", "mixed", "a_unit_per_parameter"}
# Nothing there updates on the host with its weights on the device.
NOTHING = {"device_whole", "streamed", "streamed_whole", "streamed_in_little_room"}


@functools.cache
def _reference(recipe: Recipe):
    return reference(recipe)


@pytest.fixture
def counts(monkeypatch):
    """(taken, discarded) of every engine that was closed."""
    found = []
    close = SpeculativeUpdates.close

    def _close(self):
        found.append((self.taken, self.discarded))
        close(self)

    monkeypatch.setattr(SpeculativeUpdates, "close", _close)
    return found


@pytest.fixture(autouse=True)
def _not_timed(monkeypatch):
    """How long steps take decides nothing here."""
    monkeypatch.setattr(trial, "_WARM_UP", 1000)


def _check(recipe: Recipe, options: EngineOptions, policy: Speculative = ALWAYS) -> None:
    options = replace(options, policy=policy)
    assert_same_bits(_reference(recipe), train(replace(recipe, options=options)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("clip", [None, CLIP, RARELY])
@pytest.mark.parametrize(
    "place", [pytest.param(p, marks=[] if p in QUICK else [SLOW]) for p in PLACES]
)
def test_one_backward_per_update(place, clip, dtype, device, counts):
    recipe = Recipe(dtype=dtype, clip=clip, device=device, overflow_at=6)
    _check(recipe, PLACES[place])
    if "weights" in place or place in NOTHING or place == "planned":
        return
    taken, discarded = counts[-1]
    assert taken
    assert discarded  # the step that overflows, at least
    assert clip == CLIP or taken > discarded


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ONE_DTYPE_FIRST, ids=str)
@pytest.mark.parametrize("sums", ["learned", "host", "device"])
@pytest.mark.parametrize("place", ["host", pytest.param("tiny_pieces_whole", marks=SLOW)])
def test_several_backwards_per_update(place, sums, dtype, device, counts):
    recipe = Recipe(dtype=dtype, micro=4, device=device, steps=10, clip=RARELY)
    options = PLACES[place]
    if sums != "learned":
        options = replace(options, backwards=4, sum_place=SumPlace(sums))
    _check(recipe, options)
    assert counts[-1][0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("whole", SixteenBitMaster)
def test_delayed_and_reordered_copies(whole, seed, device, counts):
    recipe = Recipe(
        dtype=torch.bfloat16,
        micro=1 + seed % 2,
        device=device,
        steps=8,
        clip=RARELY,
        overflow_at=5,
    )
    fault = FaultScript(seed=seed, max_delay_us=2000)
    options = EngineOptions(fault=fault, piece_elements=50, unit_elements=200, bf16_master=whole)
    _check(recipe, options)
    assert all(counts[-1])


@pytest.mark.parametrize("with_it", [0.5, 2.0])
def test_steps_that_are_shorter_without(with_it, monkeypatch, counts):
    """With it for a while, then without, then with what is faster."""
    for name in ("_WARM_UP", "_SETTLING", "_TIMED"):
        monkeypatch.setattr(trial, name, 2)
    seconds = {True: with_it, False: 1.0}
    ways = []

    class Timed(Trial):
        def __init__(self):
            self.now = 0.0
            super().__init__(clock=lambda: self.now)

        def step(self):
            ways.append(self.uses)
            self.now += seconds[self.uses]
            return super().step()

    monkeypatch.setattr(speculative, "Trial", Timed)
    recipe = Recipe(dtype=torch.bfloat16, clip=RARELY, steps=16)
    _check(recipe, EngineOptions())
    assert ways == [True] * 6 + [False] * 4 + [with_it < 1.0] * 6
    assert counts[-1][0] > 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_schedule_and_a_gate(device, counts):
    """Clipped in most steps: after the first tries nothing is made in vain."""
    recipe = Recipe(dtype=torch.bfloat16, clip=1e-3, device=device, decay=0.9, steps=30)
    _check(recipe, EngineOptions(), Speculative())
    assert counts[-1][0] == 0
    assert counts[-1][1] <= 6


class _Branches(nn.Module):
    """A layer that every third step leaves out, and one that is used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(13, 13), nn.Linear(13, 13)
        self.count = 0

    def forward(self, x):
        self.count += 1
        x = self.first(torch.tanh(self.first(x)))
        return self.second(x) if self.count % 3 else x


def _interrupted(policy):
    """What comes after a unit's update was tried: more backwards, writes, other options."""
    model = _Branches().bfloat16()
    options = EngineOptions(device="cpu", policy=policy, clip_norm=RARELY, unit_elements=1)
    model, optimizer = offload_with(model, optimizer_for(model), options=options)
    generator = torch.Generator().manual_seed(3)
    for step in range(14):
        x = torch.randn(5, 13, generator=generator).bfloat16()
        model(x).float().square().mean().backward()
        if step == 4:
            model(x).float().mean().backward()  # another one than was learned
        if step == 6:
            with torch.no_grad():
                model.first.weight.mul_(0.5)
        if step == 8:
            optimizer.param_groups[0]["lr"] *= 2
        if step == 9:
            model.second.weight.grad = None
        if step == 10:
            model.first.bias.grad = torch.ones(13).bfloat16()
        if step == 11:
            model.state_dict()  # of before the step
        if step == 12:
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    found = [value.clone() for value in model.state_dict().values()]
    found += [value.clone() for entry in optimizer.state.values() for value in entry.values()]
    policy = optimizer.engine.collector.policy
    optimizer.close()
    return found, policy


def test_whatever_comes_late():
    expected, _ = _interrupted(EngineOptions().policy)
    found, policy = _interrupted(ALWAYS)
    for left, right in zip(expected, found, strict=True):
        assert torch.equal(left, right)
    assert policy.taken
    assert policy.discarded >= 4
