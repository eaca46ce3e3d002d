"""Law 1: where state lives and how it moves never changes a bit."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch

from forebay.engine import EngineOptions
from forebay.engine.options import SumPlace, Timing
from forebay.engine.streamer import Streamer
from forebay.links import FaultScript
from forebay.plan import SixteenBitMaster, UpdatePlace, WeightPlace
from numerics.training import CLIP, Recipe, assert_same_bits, reference, train

pytestmark = pytest.mark.usefixtures("deterministic")

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
        ],
    ),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# bf16 has the most layouts; the other dtypes' full matrix takes minutes
ONE_DTYPE_FIRST = [
    torch.bfloat16,
    pytest.param(torch.float32, marks=pytest.mark.slow),
    pytest.param(torch.float16, marks=pytest.mark.slow),
]


def _every_place_in_turn(spec):
    return [list(UpdatePlace)[index % 3] for index, _ in enumerate(spec.units)]


PLACES = {
    "planned": EngineOptions(),
    "host": EngineOptions(update=UpdatePlace.HOST),
    "one_unit": EngineOptions(unit_elements=1 << 30),
    "a_unit_per_parameter": EngineOptions(unit_elements=1),
    "odd_units": EngineOptions(unit_elements=500),
    "whole_masters": EngineOptions(bf16_master=SixteenBitMaster.WHOLE),
    "synchronous": EngineOptions(timing=Timing.SYNCHRONOUS),
    "small_pieces": EngineOptions(piece_elements=64),
    "tiny_pieces_whole": EngineOptions(piece_elements=17, bf16_master=SixteenBitMaster.WHOLE),
    "one_thread": EngineOptions(threads=1),
    "five_threads": EngineOptions(threads=5, piece_elements=100),
    "device_whole": EngineOptions(update=UpdatePlace.DEVICE, bf16_master=SixteenBitMaster.WHOLE),
    "streamed": EngineOptions(update=UpdatePlace.STREAMED),
    "streamed_whole": EngineOptions(
        update=UpdatePlace.STREAMED, bf16_master=SixteenBitMaster.WHOLE, unit_elements=300
    ),
    # 7,680 or 5,120 bytes a unit in bf16, a fifth less or more in others: one has room at a time
    "streamed_in_little_room": EngineOptions(update=UpdatePlace.STREAMED, staging_bytes=9300),
    "mixed": EngineOptions(places=_every_place_in_turn, unit_elements=30),
    # Weights on the host; the largest unit takes 1,536 or 2,560 bytes, all three 4,096 or 6,656.
    "weights_one_by_one": EngineOptions(weights=WeightPlace.HOST, device_budget=2560),
    "weights_two_by_two": EngineOptions(weights=WeightPlace.HOST, pool_bytes=5000),
    "weights_in_ample_room": EngineOptions(weights=WeightPlace.HOST),
    "weights_by_parameter": EngineOptions(
        weights=WeightPlace.HOST, device_budget=2560, unit_elements=1, piece_elements=64
    ),
    "weights_and_whole_masters": EngineOptions(
        weights=WeightPlace.HOST, device_budget=2560, bf16_master=SixteenBitMaster.WHOLE
    ),
    "weights_and_state_streamed": EngineOptions(
        weights=WeightPlace.HOST, pool_bytes=2560, update=UpdatePlace.STREAMED
    ),
    "weights_and_state_mixed": EngineOptions(
        weights=WeightPlace.HOST, pool_bytes=2560, places=_every_place_in_turn, staging_bytes=9300
    ),
    "weights_synchronous": EngineOptions(
        weights=WeightPlace.HOST, pool_bytes=2560, timing=Timing.SYNCHRONOUS
    ),
    "delayed_copies": EngineOptions(fault=FaultScript(seed=3, max_delay_us=500), piece_elements=90),
}

# Their like is among the others.
_SLOW = {"weights_in_ample_room", "weights_and_whole_masters", "weights_synchronous"}
QUICK_PLACES = [
    pytest.param(place, marks=[pytest.mark.slow] if place in _SLOW else []) for place in PLACES
]


@functools.cache
def _reference(recipe: Recipe):
    return reference(recipe)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("clip", [None, CLIP], ids=["no_clip", "clip"])
@pytest.mark.parametrize("place", QUICK_PLACES)
def test_one_backward_per_update(place, clip, dtype, device):
    recipe = Recipe(dtype=dtype, clip=clip, device=device)
    expected = _reference(recipe)
    if clip is not None:
        assert any(norm > clip for norm in expected.norms)
        assert any(norm < clip for norm in expected.norms)
    assert_same_bits(expected, train(replace(recipe, options=PLACES[place])))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ONE_DTYPE_FIRST, ids=str)
@pytest.mark.parametrize("sums", ["learned", "host", "device"])
@pytest.mark.parametrize("place", QUICK_PLACES)
def test_several_backwards_per_update(place, sums, dtype, device):
    recipe = Recipe(dtype=dtype, micro=4, device=device)
    options = PLACES[place]
    if sums != "learned":
        options = replace(options, backwards=4, sum_place=SumPlace(sums))
    assert_same_bits(_reference(recipe), train(replace(recipe, options=options)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("place", [p for p in PLACES if "streamed" in p or "state" in p])
def test_state_that_is_to_visit_does(place, dtype, monkeypatch):
    """Else the tests above would say nothing of visits: a unit that finds no room stays away."""
    awaited, await_state = [], Streamer.await_state

    def _count(self, unit):
        awaited.append(unit.name)
        return await_state(self, unit)

    monkeypatch.setattr(Streamer, "await_state", _count)
    train(Recipe(dtype=dtype, options=PLACES[place], steps=3))
    assert awaited


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(5))
def test_delayed_and_reordered_copies(seed, device):
    recipe = Recipe(dtype=torch.bfloat16, micro=1 + seed % 2, device=device, steps=6)
    fault = FaultScript(seed=seed, max_delay_us=2000)
    options = EngineOptions(fault=fault, piece_elements=50, unit_elements=200)
    host = train(replace(recipe, options=options))
    assert_same_bits(_reference(recipe), host)
    # 7,680 or 5,120 bytes a unit: room for one of two in the one case, for all in the other
    little = replace(options, update=UpdatePlace.STREAMED, staging_bytes=8000)
    streamed = replace(little, staging_bytes=None)
    visits = [train(replace(recipe, options=place)) for place in (little, streamed)]
    for found in visits:
        assert_same_bits(_reference(recipe), found)
    assert host.up < visits[0].up < visits[1].up
    for place in (options, little, streamed):
        away = replace(place, weights=WeightPlace.HOST, pool_bytes=2560)
        assert_same_bits(_reference(recipe), train(replace(recipe, options=away)))


def test_overflow_skips_and_halves():
    expected = _reference(Recipe(dtype=torch.float16))
    # a scale of 2**20 overflows fp16 at first: some steps were skipped, then training went on
    assert any(not math.isfinite(norm) for norm in expected.norms)
    assert 0 < expected.steps[0] < 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_traffic_is_the_law(dtype):
    recipe = Recipe(dtype=dtype, steps=3)
    elements = 13 * 37 + 37 + 37 * 11 + 11 + 11 * 3 + 3
    item = dtype.itemsize
    single = train(recipe)
    assert (single.down, single.up) == (3 * item * elements, 3 * item * elements)
    host = train(replace(recipe, micro=4, options=EngineOptions(backwards=4)))
    assert (host.down, host.up) == (3 * 4 * item * elements, 3 * item * elements)
    device_sum = EngineOptions(backwards=4, sum_place=SumPlace.DEVICE)
    device = train(replace(recipe, micro=4, options=device_sum))
    assert (device.down, device.up) == (3 * 4 * elements, 3 * item * elements)
    streamed = train(replace(recipe, options=EngineOptions(update=UpdatePlace.STREAMED)))
    state_item = 10 if dtype is torch.bfloat16 else 8
    # parts are padded to 256 elements: 481 + 37, 407 + 11 and 33 + 3
    padded = (512 + 256) + (512 + 256) + (256 + 256)
    assert (streamed.down, streamed.up) == (3 * state_item * padded, 3 * state_item * padded)
    # all addends but the last go down, and their fp32 sum comes up with the state
    options = EngineOptions(update=UpdatePlace.STREAMED, backwards=4)
    summed = train(replace(recipe, micro=4, options=options))
    assert summed.down == 3 * (state_item * padded + 3 * item * elements)
    assert summed.up == 3 * (state_item + 4) * padded
    resident = train(replace(recipe, options=EngineOptions(update=UpdatePlace.DEVICE)))
    assert (resident.down, resident.up) == (0, 0)
