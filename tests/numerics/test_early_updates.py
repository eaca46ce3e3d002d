"""Updates during backward: the same bits as updates in `step()`, wherever and however."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from forebay.engine import EngineOptions
from forebay.engine.file_space import NvmeOptions
from forebay.engine.options import OverflowCheck, SumPlace
from forebay.engine.policies.early import EarlyUpdates
from forebay.links import FaultScript
from forebay.plan import UpdatePlace
from numerics.test_exactness import DEVICES, PLACES
from numerics.training import Recipe, assert_same_bits, reference, small_model, train

pytestmark = pytest.mark.usefixtures("deterministic")

UNCHECKED = EngineOptions(overflow=OverflowCheck.OFF)
DEFERS_NOTHING = {"synchronous"}
# float16 has a loss scale, which the step alone knows
DTYPES = [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
SUMS = [pytest.param("learned", marks=pytest.mark.slow), "host", "device"]


def _recipe(**changes):
    return Recipe(**{"clip": None, "dtype": torch.bfloat16, "steps": 8, **changes})


@functools.cache
def _reference(recipe: Recipe, build=small_model):
    return reference(recipe, build)


@pytest.fixture
def started(monkeypatch):
    """Names of the units that were updated early, in order."""
    names = []
    complete = EarlyUpdates._start

    def _start(self, program, unit):
        before = len(self._started)
        complete(self, program, unit)
        names.extend(u.name for u in self._started[before:])

    monkeypatch.setattr(EarlyUpdates, "_start", _start)
    return names


def _train(recipe, options, build=small_model):
    options = replace(options, overflow=OverflowCheck.OFF)
    return train(replace(recipe, options=options), build)


def _some_in_files(spec):
    places = [UpdatePlace.NVME, UpdatePlace.HOST, UpdatePlace.NVME, UpdatePlace.DEVICE]
    return [places[index % 4] for index, _ in enumerate(spec.units)]


@pytest.mark.parametrize("micro", [1, 4])
def test_units_in_files_update_in_the_step(tmp_path, micro, started):
    """Those beside them update early; in files is an order of its own, and no unit is left out."""
    nvme = NvmeOptions(paths=(tmp_path,))
    options = EngineOptions(places=_some_in_files, unit_elements=1, nvme=nvme, backwards=micro)
    recipe = _recipe(micro=micro)
    assert_same_bits(_reference(recipe), _train(recipe, options))
    assert len(started) >= 6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_one_backward_per_update(place, dtype, device, started):
    recipe = _recipe(dtype=dtype, device=device)
    assert_same_bits(_reference(recipe), _train(recipe, PLACES[place]))
    if place in DEFERS_NOTHING:
        assert not started
    elif "weights" not in place and "streamed" not in place:
        assert len(started) >= 6  # whose weights live on the host, or whose state is late, may wait


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize("place", ["host", "whole_masters", "device_whole", "streamed", "mixed"])
def test_several_backwards_per_update(place, sums, device, started):
    recipe = _recipe(micro=4, device=device)
    options = PLACES[place]
    if sums != "learned":
        options = replace(options, backwards=4, sum_place=SumPlace(sums))
    assert_same_bits(_reference(recipe), _train(recipe, options))
    assert started


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("micro", [1, 4])
def test_delayed_and_reordered_copies(micro, seed, device, started):
    recipe = _recipe(micro=micro, device=device)
    fault = FaultScript(seed=seed, max_delay_us=1500)
    options = EngineOptions(fault=fault, piece_elements=50, unit_elements=200, backwards=micro)
    assert_same_bits(_reference(recipe), _train(recipe, options))
    assert started
    streamed = replace(options, update=UpdatePlace.STREAMED, staging_bytes=8000)
    assert_same_bits(_reference(recipe), _train(recipe, streamed))


class _Tied(nn.Module):
    """The embedding's weight is the head's, and is read again in between."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 13))
        self.first = nn.Linear(13, 13, bias=False)
        self.last = nn.Linear(13, 13, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = x + torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.last(x)


def _tied(dtype, reentrant):
    torch.manual_seed(0)
    model = _Tied().to(dtype)
    model.reentrant = reentrant
    return model


_build_tied = functools.partial(_tied, reentrant=False)
_build_reentrant = functools.partial(_tied, reentrant=True)


@pytest.mark.parametrize("build", [_build_tied, _build_reentrant])
@pytest.mark.parametrize("place", ["host", "a_unit_per_parameter", "device_whole", "streamed"])
def test_tied_and_recomputed_weights(place, build, started):
    recipe = _recipe()
    assert_same_bits(_reference(recipe, build), _train(recipe, PLACES[place], build))
    assert started or place == "streamed"
