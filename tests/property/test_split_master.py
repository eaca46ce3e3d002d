"""A split master loses nothing: every fp32 bit pattern comes back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.optim.master import join, round_bf16, split

PATTERNS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64)
# Sign, an exponent of every kind, mantissas around each rounding decision.
MANTISSAS = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x17FFF, 0x18000, 0x400000)
CORNERS = np.array(
    [
        sign << 31 | exponent << 23 | mantissa
        for sign in (0, 1)
        for exponent in (0, 1, 2, 127, 253, 254, 255)
        for mantissa in (*MANTISSAS, 0x7F7FFF, 0x7F8000, 0x7FFFFF)
    ],
    dtype=np.uint32,
)


def values(patterns) -> torch.Tensor:
    return torch.from_numpy(np.asarray(patterns, dtype=np.uint32).view(np.int32).copy()).view(
        torch.float32
    )


def check(patterns) -> None:
    value = values(patterns)
    high, low = split(value)
    assert (high.dtype, low.dtype) == (torch.bfloat16, torch.int16)
    again = join(high, low)
    nan = value.isnan()
    assert torch.equal(again.view(torch.int32)[~nan], value.view(torch.int32)[~nan])
    # The payload of a NaN may change; that it is one may not, in either half.
    assert torch.equal(again.isnan(), nan)
    assert torch.equal(high.isnan(), nan)
    assert torch.equal(high.view(torch.int16), round_bf16(value).view(torch.int16))


@given(PATTERNS)
@settings(max_examples=300, deadline=None)
def test_any_pattern_comes_back(patterns):
    check(patterns)


def test_corners_come_back():
    check(CORNERS)


@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_every_upper_half_comes_back(low):
    """All 65536 upper halves: both ties (0x8000 below and above) of every bf16 value."""
    check((np.arange(65536, dtype=np.uint32) << 16) | np.uint32(low))


@given(PATTERNS)
@settings(max_examples=300, deadline=None)
def test_rounding_is_to_nearest_with_ties_away_from_zero(patterns):
    """Against the definition on magnitudes, in integers."""
    patterns = np.asarray(patterns, dtype=np.uint64)
    finite = (patterns & 0x7F800000) != 0x7F800000
    patterns = patterns[finite]
    sign, magnitude = patterns & 0x80000000, patterns & 0x7FFFFFFF
    expected = (sign | (magnitude + 0x8000)) >> 16
    rounded = round_bf16(values(patterns.astype(np.uint32))).view(torch.int16).numpy()
    assert np.array_equal(rounded.view(np.uint16), expected.astype(np.uint16))


def test_known_values():
    one = 0x3F800000
    cases = {
        one: 0x3F80,
        one | 0x7FFF: 0x3F80,
        one | 0x8000: 0x3F81,
        one | 0x80008000: 0xBF81,
        0x80000000: 0x8000,
        0x7F7FFFFF: 0x7F80,
        0x00008000: 0x0001,
        0x7F800000: 0x7F80,
        0x7FFFFFFF: 0x7FFF,
    }
    bits = round_bf16(values(list(cases))).view(torch.int16).numpy().view(np.uint16)
    assert bits.tolist() == list(cases.values())


def test_shapes_and_strides():
    value = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    for one in (value, value.t(), value[:, ::2], value[0, 0], value[:0]):
        high, low = split(one)
        assert torch.equal(join(high, low), one)


def test_only_fp32_is_split():
    with pytest.raises(TypeError, match="float64"):
        split(torch.zeros(1, dtype=torch.float64))
