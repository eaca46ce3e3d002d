"""Delayed updates: the bits of the same rule in plain PyTorch, wherever and however."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from forebay.engine import EngineOptions
from forebay.engine.file_space import NvmeOptions
from forebay.engine.options import SumPlace
from forebay.links import FaultScript
from forebay.plan import SixteenBitMaster, UpdatePlace
from forebay.plan.policies import Delayed
from forebay.plan.share import places_for_share
from numerics.delayed_reference import NEVER, train_delayed
from numerics.test_exactness import DEVICES, DTYPES, ONE_DTYPE_FIRST
from numerics.training import CLIP, Recipe, assert_same_bits, train

pytestmark = pytest.mark.usefixtures("deterministic")

# Several records of each part, and fewer buffers than they are.
TINY = NvmeOptions(paths=(Path(tempfile.gettempdir()),), buffer_count=2, buffer_elements=200)
DELAYED = EngineOptions(policy=Delayed())
SLOW = pytest.mark.slow
PLACES = {
    "host": DELAYED,
    "one_unit": replace(DELAYED, unit_elements=1 << 30),
    "a_unit_per_parameter": replace(DELAYED, unit_elements=1),
    "whole_masters": replace(DELAYED, bf16_master=SixteenBitMaster.WHOLE),
    "tiny_pieces_whole": replace(DELAYED, piece_elements=17, bf16_master=SixteenBitMaster.WHOLE),
    "five_threads": replace(DELAYED, threads=5, piece_elements=100),
    "half_on_device": replace(
        DELAYED, unit_elements=1, places=partial(places_for_share, share=0.5)
    ),
    "device": replace(DELAYED, update=UpdatePlace.DEVICE),
    "files": replace(DELAYED, nvme=TINY),
}
QUICK = ("host", "half_on_device", "files")


@functools.cache
def _reference(recipe: Recipe, warm_up: int = 0):
    return train_delayed(recipe, warm_up=warm_up)


def _check(recipe: Recipe, options: EngineOptions, *, warm_up: int = 0) -> None:
    options = replace(options, policy=Delayed(warm_up_steps=warm_up))
    assert_same_bits(_reference(recipe, warm_up), train(replace(recipe, options=options)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("micro", [1, 3])
def test_the_reference_is_exact_training_where_nothing_is_delayed(dtype, micro):
    """What it shares with the engine but for the time of updates, it has right."""
    recipe = Recipe(dtype=dtype, micro=micro, steps=8)
    assert_same_bits(_reference(recipe, NEVER), train(recipe))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("clip", [pytest.param(None, marks=SLOW), CLIP], ids=["no_clip", "clip"])
@pytest.mark.parametrize(
    "place", [*QUICK, *[pytest.param(place, marks=SLOW) for place in PLACES if place not in QUICK]]
)
def test_one_backward_per_update(place, clip, dtype, device):
    """A skipped step in the middle brings the one before into force."""
    recipe = Recipe(dtype=dtype, clip=clip, device=device, overflow_at=6)
    exact = _reference(recipe, NEVER)
    expected = _reference(recipe)
    assert expected.losses != exact.losses
    if clip is not None:
        assert any(norm > clip for norm in expected.norms)
        assert any(norm < clip for norm in expected.norms)
    if dtype is torch.float16:
        assert expected.steps[0] < 19  # it begins with a loss scale that is too large
    _check(recipe, PLACES[place])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ONE_DTYPE_FIRST, ids=str)
@pytest.mark.parametrize("sums", ["learned", pytest.param("host", marks=SLOW), "device"])
@pytest.mark.parametrize("place", ["host", "tiny_pieces_whole", "half_on_device", "files"])
def test_several_backwards_per_update(place, sums, dtype, device):
    recipe = Recipe(dtype=dtype, micro=4, device=device, steps=8)
    options = PLACES[place]
    if sums != "learned":
        options = replace(options, backwards=4, sum_place=SumPlace(sums))
    _check(recipe, options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("warm_up", [1, 3, NEVER])
def test_exact_steps_first_and_a_schedule(warm_up, device):
    recipe = Recipe(dtype=torch.bfloat16, device=device, steps=8, decay=0.8)
    _check(recipe, DELAYED, warm_up=warm_up)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("where", [*SixteenBitMaster, "files"])
def test_delayed_and_reordered_copies(where, seed, device):
    recipe = Recipe(dtype=torch.bfloat16, micro=1 + seed % 2, device=device, steps=6)
    fault = FaultScript(seed=seed, max_delay_us=2000)
    options = EngineOptions(fault=fault, piece_elements=50, unit_elements=200)
    if where == "files":
        options = replace(options, nvme=TINY)
    else:
        options = replace(options, bf16_master=where)
    _check(recipe, options)
