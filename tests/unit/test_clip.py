"""One scale for averaging, loss scale and clipping."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from forebay.optim.clip import global_norm, gradient_scale, ordered_sum
from forebay.optim.squares import square_sum


def test_no_clipping_is_the_average_alone():
    assert gradient_scale(1e30, max_norm=None) == 1.0
    assert gradient_scale(1e30, max_norm=None, divisor=2.0**16 * 4) == 2.0**-18
    assert gradient_scale(1.0, max_norm=None, divisor=3.0) == float(np.float32(1 / 3))


def test_a_small_norm_is_left_alone():
    assert gradient_scale(0.5, max_norm=1.0) == 1.0
    assert gradient_scale(0.0, max_norm=1.0, divisor=2.0) == 0.5


def test_a_large_norm_is_clipped_with_one_rounding():
    norm, divisor = 3.7, 1024.0 * 3
    expected = np.float32((1.0 / divisor) * (1.0 / (norm + 1e-6)))
    assert gradient_scale(norm, max_norm=1.0, divisor=divisor) == float(expected)


def test_clipping_agrees_with_torch():
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 1000, 1)]
    for index, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 0.3 * (index + 1))
    sums = [float(square_sum(parameter.grad)) for parameter in parameters]
    before = parameters[1].grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    ours = global_norm(sums)
    # torch sums squares in float32: 1004 terms, each off by at most 2^-24 of the total.
    assert ours == pytest.approx(float(norm), rel=1004 * 2.0**-24)
    torch.testing.assert_close(
        before * gradient_scale(ours, max_norm=1.0), parameters[1].grad, rtol=1e-5, atol=0
    )


def test_the_norm_is_that_of_averaged_unscaled_gradients():
    assert global_norm([9.0, 16.0], divisor=5.0) == 1.0
    assert global_norm([]) == 0.0


def test_not_finite_is_never_taken_for_small():
    assert math.isnan(global_norm([1.0, math.nan]))
    assert math.isnan(gradient_scale(math.nan, max_norm=1.0))
    assert global_norm([math.inf]) == math.inf
    assert gradient_scale(math.inf, max_norm=1.0) == 0.0


def test_sums_go_from_left_to_right_without_compensation():
    """Python's own `sum` of floats gives 2.0 from 3.12 on and 0.0 before."""
    assert ordered_sum([1.0, 1e100, 1.0, -1e100]) == 0.0
