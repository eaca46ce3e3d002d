"""Functions that take turns compute as their caller would."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from forebay.accelerators.cpu import CpuAccelerator
from forebay.engine.turns import Turns


def _there(function):
    """What a function returns in a thread of its own."""
    (result,) = Turns(CpuAccelerator()).run([function], done=lambda _number, _result: None)
    return result


def _openmp():
    """The library whose number of threads is each thread's own; torch's answer would set it."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    found = [line.split()[-1] for line in lines if "libgomp" in line or "libomp" in line]
    return ctypes.CDLL(found[0]) if found else pytest.skip("this torch has no OpenMP of its own")


def test_a_number_of_threads_that_was_set_holds():
    openmp, before = _openmp(), torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert _there(openmp.omp_get_max_threads) == before + 1
        assert openmp.omp_get_max_threads() == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("infers", [True, False])
def test_what_records_no_graph_records_none(records, infers):
    with torch.inference_mode(infers), torch.set_grad_enabled(records):
        expected = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        found = _there(lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
    assert found == expected


def test_autocast_is_the_callers():
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        found = _there(
            lambda: (
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                torch.is_autocast_cache_enabled(),
            )
        )
    assert found == (True, torch.float16, False)


def test_the_default_device_is_the_callers_and_stays_it():
    before = torch.get_default_device()
    torch.set_default_device("meta")
    try:
        assert _there(lambda: (torch.ones(1).device.type, torch.get_default_device().type)) == (
            "meta",
            "meta",
        )
        assert torch.ones(1).device.type == "meta"
    finally:
        torch.set_default_device(None)
    assert torch.get_default_device() == before
    with torch.device("meta"):
        assert _there(lambda: torch.ones(1).device.type) == "meta"


def test_modes_see_what_is_computed():
    class Seen(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with FlopCounterMode(display=False) as flops, Seen() as seen:
        _there(lambda: torch.mm(torch.ones(3, 3), torch.ones(3, 3)))
        inside = flops.get_total_flops()
    assert "mm" in seen.names
    assert inside == 2 * 3**3


def test_saved_tensor_hooks_come_in_their_order():
    told = []

    def hooks(name):
        return saved_tensors_hooks(lambda t: (told.append(name), t)[1], lambda t: t)

    def multiply():
        x = torch.ones(2, requires_grad=True)
        return (x * x).sum()

    with hooks("outer"), hooks("inner"):
        _there(multiply)
        assert set(told) == {"inner"}
    told.clear()
    multiply()
    assert not told
