"""Peaks that an H200 had (`benchmarks/results`), beside what the planner says of them."""

from __future__ import annotations

import pytest

from forebay.bench.spec import SHAPES
from forebay.plan.activations import activations
from forebay.plan.model_config import shape_of
from forebay.plan.placement import UpdatePlace
from forebay.plan.setup import Home, Setup
from forebay.plan.tiers import tier_bytes
from forebay.plan.workload import Inputs, Workload
from plan_cases import LLAMA_3B, LLAMA_7B

_3B, _7B = shape_of(LLAMA_3B, source="3b"), shape_of(LLAMA_7B, source="7b")
# cuBLAS's workspace on this device, and the batch: at rest beyond the ledger.
_WORKSPACE = 67_377_664


def _said(shape, *, rows, optimizer=Home.HOST, weights=Home.DEVICE, accumulation=1, places=""):
    """The forecast; `places` has a letter for each of the first units: Device or Streamed."""
    work = Workload(micro_batch=rows, accumulation=accumulation, sequence=2048)
    stage = 2 if weights is Home.DEVICE else 3
    letters = {"D": UpdatePlace.DEVICE, "S": UpdatePlace.STREAMED}
    rest = len(shape.unit_elements()) - len(places)
    found = tier_bytes(
        shape,
        Setup(stage=stage, optimizer=optimizer, weights=weights, workload=work),
        places=[letters[one] for one in places] + [UpdatePlace.HOST] * rest if places else (),
    )
    return found.total("device") + _WORKSPACE


@pytest.mark.parametrize(
    ("rows", "places", "measured"),
    [
        (2, "S", 13_603_072_000),
        (4, "S" * 6, 20_712_535_040),
        (8, "S" * 15, 34_931_389_440),
        (16, "S" * 15, 63_369_098_240),
        # A quarter and a half of the state stay on the device.
        (8, "D" * 6 + "S" * 11, 43_904_886_272),
        (8, "D" * 16 + "S" * 6, 53_971_830_272),
    ],
)
def test_peaks_with_state_on_the_host_are_foretold(rows, places, measured):
    """The units that visited are those of the run: bytes at most staged over bytes of each."""
    assert _said(_3B, rows=rows, places=places) == pytest.approx(measured, rel=0.001)


def test_a_gradient_that_stayed_too_long_is_within_three_percent():
    """An earlier engine held a landed embedding's gradient until the next backward."""
    assert _said(_3B, rows=8, places="S" * 12) == pytest.approx(35_719_391_232, rel=0.03)


@pytest.mark.parametrize(
    ("rows", "measured"), [(4, 59_265_661_440), (8, 73_484_515_840), (16, 101_922_224_640)]
)
def test_peaks_without_offload_are_foretold(rows, measured):
    """Plain PyTorch keeps whole masters: 2 bytes more for each parameter than split ones."""
    said = _said(_3B, rows=rows, optimizer=Home.DEVICE) + 2 * _3B.parameters
    assert said == pytest.approx(measured, rel=0.001)


@pytest.mark.parametrize(
    ("places", "measured"),
    [
        ("", 34_931_387_904),
        ("D" * 3, 43_266_166_272),
        ("D" * 10, 53_131_771_392),
    ],
)
def test_peaks_of_four_micro_batches_are_foretold(places, measured):
    """Gradients of the backward before have left when the next loss is computed."""
    assert _said(_3B, rows=8, accumulation=4, places=places) == pytest.approx(measured, rel=0.001)


def test_the_peak_of_four_micro_batches_without_offload_is_foretold():
    """Plain PyTorch adds gradients up in 16 bits, and has whole masters."""
    said = _said(_3B, rows=8, optimizer=Home.DEVICE, accumulation=4)
    assert said == pytest.approx(79_910_015_488, rel=0.001)


@pytest.mark.parametrize(
    ("weights", "pool", "measured"),
    [
        (Home.DEVICE, 0, 25_717_390_848),
        # The run's pool had two blocks; the planner's has DeepSpeed's default of live parameters.
        (Home.HOST, 809_533_440 - 2_000_000_000, 13_717_003_776),
    ],
)
def test_peaks_of_7b_are_foretold(weights, pool, measured):
    said = _said(_7B, rows=8, weights=weights, places="SSS") + pool
    assert said == pytest.approx(measured, rel=0.02)


def test_inputs_on_the_host_free_what_they_freed():
    """Of four blocks' inputs one is gone at the loss: both are peaks of 32k, 4 x 2,048 tokens."""
    shape = SHAPES["32k"].planned("32k")
    here = activations(shape, Workload(micro_batch=4, sequence=2048))
    there = activations(shape, Workload(micro_batch=4, sequence=2048, inputs=Inputs.HOST))
    freed = here.kept_by(shape.layers) - there.kept_by(shape.layers)
    assert freed == pytest.approx(122_285_611_520 - 121_749_135_360, rel=0.001)
