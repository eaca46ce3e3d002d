"""Law 1: where state lives and how it moves never changes a bit."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch

from forebay.engine import EngineOptions
from forebay.engine.options import SumPlace, Timing
from forebay.links import FaultScript
from forebay.plan import SixteenBitMaster, UpdatePlace
from numerics.training import CLIP, Recipe, assert_same_bits, reference, train

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

PLACES = {
    "host": EngineOptions(),
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
    "delayed_copies": EngineOptions(fault=FaultScript(seed=3, max_delay_us=500), piece_elements=90),
}


@functools.cache
def _reference(recipe: Recipe):
    return reference(recipe)


@pytest.fixture(autouse=True)
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("clip", [None, CLIP], ids=["no_clip", "clip"])
@pytest.mark.parametrize("place", PLACES)
def test_one_backward_per_update(place, clip, dtype, device):
    recipe = Recipe(dtype=dtype, clip=clip, device=device)
    expected = _reference(recipe)
    if clip is not None:
        assert any(norm > clip for norm in expected.norms)
        assert any(norm < clip for norm in expected.norms)
    assert_same_bits(expected, train(replace(recipe, options=PLACES[place])))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sums", ["learned", "host", "device"])
@pytest.mark.parametrize("place", PLACES)
def test_several_backwards_per_update(place, sums, dtype, device):
    recipe = Recipe(dtype=dtype, micro=4, device=device, steps=8)
    options = PLACES[place]
    if sums != "learned":
        options = replace(options, backwards=4, sum_place=SumPlace(sums))
    assert_same_bits(_reference(recipe), train(replace(recipe, options=options)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(5))
def test_delayed_and_reordered_copies(seed, device):
    recipe = Recipe(dtype=torch.bfloat16, micro=2, device=device, steps=6)
    fault = FaultScript(seed=seed, max_delay_us=2000)
    options = EngineOptions(fault=fault, piece_elements=50, unit_elements=200)
    assert_same_bits(_reference(recipe), train(replace(recipe, options=options)))


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
    resident = train(replace(recipe, options=EngineOptions(update=UpdatePlace.DEVICE)))
    assert (resident.down, resident.up) == (0, 0)
