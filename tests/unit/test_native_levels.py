"""The same bits at every instruction set level, and in the fallback."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import hashlib, itertools, os, sys
import numpy as np
from unit.native_cases import *
import warnings
warnings.simplefilter("ignore")
from forebay import native
core = native.core()
digest = hashlib.sha256()
pool = core.Pool(2, [])
dtypes = ["float32", "bfloat16", "float16"]
for n, grad, out, mode in itertools.product(
    [67, 4097, 9001], dtypes, dtypes, ["decoupled", "l2", "none"]
):
    for layout in ("whole", "split"):
        part = Part(
            elements=n, grad_dtype=grad, out_dtype=out, layout=layout, special=True, seed=n,
            out="apart" if layout == "whole" else "none", piece_elements=3000, shift=n % 3,
            numbers=[Numbers(decay_mode=mode)],
        )
        for _ in range(3):
            assert part.update(core, pool).wait(60)
        digest.update(part.digest().encode())
    values = placed(narrow(random_state(n, 5)[3], grad), 1)
    sums = pool.square_sums([(address(values), n)], grad).results()
    digest.update(np.array(sums).tobytes())
    target = np.zeros(n, np.uint16 if out == "bfloat16" else np.dtype(out))
    core.convert(address(target), out, address(values), grad, n)
    digest.update(target.tobytes())
    digest.update(str(core.crc32c(address(values), values.nbytes, n)).encode())
pool.close()
print(core.kernel_level(), digest.hexdigest())
"""


@functools.cache
def _run(level: str) -> tuple[str, str]:
    """(level, digest) of the battery in a new process; skips where the level cannot run."""
    result = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env={
            **os.environ,
            "FOREBAY_KERNEL_LEVEL": level,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if "is not available" in result.stderr:
        return level, ""
    assert result.returncode == 0, result.stderr
    name, digest = result.stdout.split()
    return name, digest


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("level", ["avx2", "avx512", "fallback"])
def test_levels_agree_to_the_bit(level):
    name, digest = _run(level)
    if not digest:
        pytest.skip(f"this processor cannot run {level}")
    assert name == level
    assert digest == _run("baseline")[1]


def test_an_unknown_level_is_refused(native, monkeypatch):
    monkeypatch.setenv("FOREBAY_KERNEL_LEVEL", "sse9")
    with pytest.raises(ValueError, match="sse9"):
        native.Pool(1, [])


def test_a_pool_keeps_its_level(native, monkeypatch):
    monkeypatch.setenv("FOREBAY_KERNEL_LEVEL", "baseline")
    pool = native.Pool(1, [])
    monkeypatch.delenv("FOREBAY_KERNEL_LEVEL")
    assert pool.kernel_level == "baseline"
    pool.close()
