"""Sums in fp32: set or added to, each source multiplied and each addition rounded apart."""

from __future__ import annotations

import numpy as np
import pytest

from unit.native_cases import ITEM, address, from_bf16, to_bf16


@pytest.mark.parametrize("elements", [1, 67, 256, 257, 70001])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scale", [1.0, 0.1, 1e-30])
@pytest.mark.parametrize("first", [True, False])
def test_scaled_sums(core, pool, elements, dtype, scale, first):
    generator = np.random.default_rng(elements)
    values = generator.standard_normal(elements).astype(np.float32)
    if dtype == "bfloat16":
        source = to_bf16(values)
        values = from_bf16(source)
    else:
        source = values.astype(dtype)
        values = source.astype(np.float32)
    total = generator.standard_normal(elements).astype(np.float32)
    scaled = values * np.float32(scale)
    want = scaled if first else total + scaled
    assert source.itemsize == ITEM[dtype]
    spans = [(address(total), address(source), elements)]
    pool.fold(spans, dtype, first, scale=scale).wait(30)
    assert np.array_equal(total.view(np.uint32), want.view(np.uint32))
