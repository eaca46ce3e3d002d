"""What computes on a device: Triton's kernels where they can be built, else torch's operations."""

from __future__ import annotations

import sys
import types
import warnings

import pytest
import torch

from forebay.errors import ForebayWarning
from forebay.optim import device_math
from forebay.optim.squares import square_blocks

CPU = torch.device("cpu")


class _NoCompiler:
    """`TritonMath` where Triton finds no compiler: it is told so by the first launch."""

    def __init__(self, device: torch.device) -> None:
        del device

    def square_sums(self, indices, tensors):
        raise RuntimeError("first line\nFailed to find C compiler. Please specify via CC")


class _Works(_NoCompiler):
    def square_sums(self, indices, tensors):
        pass

    def read(self):
        return {0: 1.0}


@pytest.fixture
def triton(monkeypatch):
    """Triton as an installed one looks, with the class that is given for its kernels."""

    def install(kind: type) -> None:
        module = types.ModuleType("forebay.optim.triton_math")
        module.TritonMath = kind
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(device_math, "_has_triton", lambda: True)

    device_math._triton_works.cache_clear()
    yield install
    device_math._triton_works.cache_clear()


def test_without_a_compiler_torch_computes_after_one_warning(triton):
    triton(_NoCompiler)
    with pytest.warns(ForebayWarning, match="Failed to find C compiler.*\nhint:") as seen:
        assert type(device_math.cuda_math(CPU)) is device_math.CudaMath
    assert len(seen) == 1
    values = torch.arange(9.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(device_math.cuda_math(CPU)) is device_math.CudaMath
        assert torch.equal(device_math.device_square_blocks(values), square_blocks(values))


def test_kernels_that_can_be_built_are_used(triton):
    triton(_Works)
    assert type(device_math.cuda_math(CPU)) is _Works
