"""Conversions: every half, and fp32 patterns around every boundary of rounding."""

from __future__ import annotations

import numpy as np
import pytest

from unit.native_cases import (
    address,
    canonical,
    canonical_bf16,
    from_bf16,
    narrow,
    placed,
    to_bf16,
)


def _patterns() -> np.ndarray:
    """fp32 values of every sign and exponent, with mantissas around fp16 and bf16 ties."""
    mantissas = np.array(
        [
            *(0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000),
            *(0x8001, 0xFFFF, 0x10000, 0x17FFF, 0x18000, 0x400000, 0x7FEFFF, 0x7FF000, 0x7F7FFF),
            *(0x7F8000, 0x7FFFFF),
        ],
        dtype=np.uint32,
    )
    exponents = np.arange(512, dtype=np.uint32) << 23
    rng = np.random.default_rng(3)
    random = rng.integers(0, 1 << 32, 100_003, dtype=np.uint32)
    return np.concatenate([(exponents[:, None] | mantissas).ravel(), random]).view(np.float32)


def _convert(core, values: np.ndarray, source: str, target: str, shift: int = 0) -> np.ndarray:
    kind = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[target]
    values = placed(values, shift)
    result = placed(np.zeros(values.size, dtype=kind), shift)
    core.convert(address(result), target, address(values), source, values.size)
    return result


@pytest.mark.parametrize("shift", [0, 1, 7])
def test_to_float16_rounds_to_even(core, shift):
    values = _patterns()[shift:]
    found = _convert(core, values, "float32", "float16", shift)
    assert np.array_equal(canonical(found), canonical(narrow(values, "float16")))


@pytest.mark.parametrize("shift", [0, 1, 7])
def test_to_bfloat16_rounds_half_away(core, shift):
    values = _patterns()[shift:]
    found = canonical_bf16(_convert(core, values, "float32", "bfloat16", shift))
    assert np.array_equal(found, canonical_bf16(to_bf16(values)))


def test_from_every_half(core):
    bits = np.arange(1 << 16, dtype=np.uint16)
    found = _convert(core, bits.view(np.float16), "float16", "float32")
    assert np.array_equal(canonical(found), canonical(bits.view(np.float16).astype(np.float32)))
    found = _convert(core, bits, "bfloat16", "float32")
    assert np.array_equal(canonical(found), canonical(from_bf16(bits)))


def test_between_the_16_bit_types(core):
    bits = np.arange(1 << 16, dtype=np.uint16)
    found = _convert(core, bits, "bfloat16", "float16")
    assert np.array_equal(canonical(found), canonical(narrow(from_bf16(bits), "float16")))
    found = canonical_bf16(_convert(core, bits.view(np.float16), "float16", "bfloat16"))
    wide = bits.view(np.float16).astype(np.float32)
    assert np.array_equal(found, canonical_bf16(to_bf16(wide)))


def test_split_and_join_lose_nothing(core):
    values = _patterns()
    high, low = np.zeros(values.size, np.uint16), np.zeros(values.size, np.uint16)
    core.split(address(values), address(high), address(low), values.size)
    assert np.array_equal(canonical_bf16(high), canonical_bf16(to_bf16(values)))
    back = np.zeros(values.size, np.float32)
    core.join(address(back), address(high), address(low), values.size)
    assert np.array_equal(canonical(back), canonical(values))


def test_nothing_is_converted_at_size_zero(core):
    core.convert(0, "float32", 0, "bfloat16", 0)
    core.split(0, 0, 0, 0)
    core.join(0, 0, 0, 0)
