"""Seconds of passes: what is measured, what bounds them, what a profile without rates falls to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.errors import ConfigError
from forebay.hardware.catalog import CATALOG
from forebay.hardware.layer_work import attention_operations
from forebay.hardware.rates import PassSeconds
from forebay.plan.compute import compute_seconds, matrix_rate
from forebay.plan.workload import Precision, Workload
from plan_cases import LLAMA_3B, question


@pytest.mark.parametrize(("rows", "seconds"), [(2, 0.2418), (4, 0.4834), (8, 0.9281), (16, 1.8449)])
def test_measured_passes_of_an_h200_are_forecast(rows, seconds):
    """The row `floor` of `benchmarks/results/step-3b-4096-to-32768-tokens-h200.md`."""
    workload = Workload(micro_batch=rows, sequence=2048)
    shape = question(LLAMA_3B, "h200").shape
    found = compute_seconds(shape, workload=workload, profile=CATALOG["h200"])
    assert sum(found.forward + found.backward) == pytest.approx(seconds, rel=0.10)


def _passes(rows: int, **changes) -> float:
    shape = question(LLAMA_3B, "h200").shape
    workload = Workload(micro_batch=rows, sequence=128)
    profile = replace(CATALOG["h200"], **changes)
    found = compute_seconds(shape, workload=workload, profile=profile)
    return sum(found.forward + found.backward)


def test_few_tokens_take_as_long_as_issuing_them():
    """However little there is to do, and however fast the device is that waits for it."""
    layer = CATALOG["h200"].layer
    least = _passes(1)
    assert _passes(2) == pytest.approx(least, rel=0.05)
    # 28 layers forward with a checkpoint each, again, and backward, with the engine's hooks.
    issue = 28 * 1.15 * (4.5 * layer.issue.forward + layer.issue.backward)
    assert issue < least < 1.2 * issue
    quick = replace(layer, issue=PassSeconds(forward=1e-4, backward=1e-4))
    assert _passes(1, layer=quick) < least / 3
    assert _passes(64, layer=quick) == pytest.approx(_passes(64), rel=0.1)


def test_a_profile_without_a_layers_rates_plans_by_the_roofline():
    assert 0.5 < _passes(64, layer=None) / _passes(64) < 1.0


def test_attention_in_another_precision_follows_the_products():
    shape = question(LLAMA_3B, "h200").shape
    profile = CATALOG["h200"]
    for precision in (Precision.BF16, Precision.FP32):
        workload = Workload(micro_batch=1, sequence=65536, precision=precision)
        found = compute_seconds(shape, workload=workload, profile=profile)
        once = attention_operations(tokens=65536, sequence=65536, width=shape.q_width)
        peak = matrix_rate(profile, dtype=precision.dtype, size=8192)
        # Attention is the most of such a step, at 0.63 of what products reach.
        assert once / (0.63 * peak) < found.forward[1] < 1.6 * once / (0.63 * peak)


def test_a_precision_without_a_rate_is_answered_with_those_that_have_one():
    profile = CATALOG["h200"]
    profile = replace(profile, matrix=tuple(r for r in profile.matrix if r.dtype != "float16"))
    with pytest.raises(ConfigError, match="no rate for float16") as caught:
        matrix_rate(profile, dtype="float16", size=1024)
    assert caught.value.hint == "choose another precision: --precision bf16 or fp32"
