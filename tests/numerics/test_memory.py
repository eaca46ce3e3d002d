"""Host memory as law 5 counts it, measured in processes of their own.

[Note: what is counted] The `cpu` accelerator keeps its device tier, the working weights, in host
memory too. So the resident memory of a process grows, from before `initialize` on, by

    host tier (14 or 16 bytes per parameter) + device tier (the ledger's device bytes) - the model

since the weights move out of the memory in which the model was built. The device tier is counted
apart and taken off the growth. Activations are torch's; they are small here (two rows of input).
Gradients on their way are torch's too, and bounded (see below); but where they were, glibc's heap
keeps free memory: the remainders of an aligned allocation, which all of torch's are, kept the
place from being used for the next one of the same size (glibc bug 30723). So there are two
numbers: what is resident at the end of a step, and what is in use, after the heap's free memory
was returned.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from forebay.engine import EngineOptions, offload_with
from forebay.links import FaultScript
from forebay.tiers.ledger import Role, Tier

MIB = 1 << 20
CASE = {"dtype": "bfloat16", "micro": 1, "offload": "cpu", "width": 2048, "depth": 24, "steps": 3}
SIXTEEN = {"bf16-sums-on-the-host": {"micro": 2}, "fp32": {"dtype": "float32"}}


def run(*cases: dict) -> list[dict]:
    """The numbers of `memory_run` for each case, all in one process.

    It has one compute thread, beside forebay's own.
    """
    script = Path(__file__).with_name("memory_run.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps([{**CASE, **case} for case in cases])],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def placed(numbers: dict, tier: str) -> int:
    """Bytes of a tier in the ledger."""
    return sum(nbytes for name, nbytes in numbers["ledger"].items() if name.startswith(tier))


def check_ledger(numbers: dict, bytes_per_parameter: int) -> None:
    """The ledger against the law and against the kernel."""
    law = bytes_per_parameter * numbers["parameters"]
    staging = numbers["ledger"].pop("host:staging", 0)
    # each parameter starts at a multiple of 256 elements
    assert law <= placed(numbers, "host") <= 1.002 * law
    for name, counted in numbers["ledger"].items():
        assert abs(numbers["mapped"][name] - counted) <= 0.01 * counted, numbers
    # A ring's slots are touched as they are needed.
    assert numbers["mapped"].get("host:staging", 0) <= staging


def growth_of_host_state(numbers: dict, resident: int) -> int:
    """[Note: what is counted]"""
    moved = placed(numbers, "device") - numbers["model"]
    return resident - numbers["before"] - moved


def check_growth(numbers: dict) -> None:
    """In use is what was placed, within 1%; with a gradient more at most at any moment."""
    predicted = placed(numbers, "host")
    in_use = growth_of_host_state(numbers, numbers["in_use"])
    assert abs(in_use - predicted) <= 0.01 * predicted
    gradient = numbers["model"]
    assert growth_of_host_state(numbers, numbers["peak"]) <= predicted + gradient


def test_a_model_of_100m_parameters_takes_14_bytes_each():
    """Resident at the end of a step, too, within 5%: the least of three, for the heap's sake."""
    (numbers,) = run({"steps": 5})
    assert numbers["parameters"] > 100_000_000
    predicted = placed(numbers, "host")
    grown = growth_of_host_state(numbers, min(numbers["resident"][2:]))
    assert abs(grown - predicted) <= 0.05 * predicted
    check_growth(numbers)
    check_ledger(numbers, 14)


@pytest.mark.slow
@pytest.mark.parametrize("changes", SIXTEEN.values(), ids=SIXTEEN)
def test_100m_parameters_that_take_16_bytes_each(changes):
    (numbers,) = run({**changes, "width": 1024, "depth": 96})
    check_growth(numbers)
    check_ledger(numbers, 16)


@functools.cache
def small_runs() -> dict[str, dict]:
    """Cases that may share a process, since each is compared with itself alone."""
    cases = {
        "flat": {"steps": 53},
        "lives": {"lives": 6},
        **SIXTEEN,
    }
    shape = {"width": 1024, "depth": 8}
    numbers = run(*({**shape, **case} for case in cases.values()))
    return dict(zip(cases, numbers, strict=True))


@pytest.mark.parametrize("name", SIXTEEN)
def test_sums_in_fp32_and_fp32_models_take_16_bytes(name):
    check_ledger(small_runs()[name], 16)


def test_memory_is_flat_over_50_steps():
    """The least of some steps each: huge pages of 2 MiB come and go, and the kernel makes new ones.

    A gradient of one layer that stayed behind at each step would be 72 MiB.
    """
    resident = small_runs()["flat"]["resident"]
    assert min(resident[-15:]) - min(resident[2:17]) <= 8 * MIB


def test_engines_that_are_closed_leave_nothing():
    resident = small_runs()["lives"]["resident"]
    assert resident[-1] - resident[0] <= 8 * MIB  # one life holds 134 MiB


def test_start_up_needs_a_tenth_more_than_the_model():
    """256 MB of fp32 weights.

    With the update on the device nothing but weights is touched before the first step (moments
    are fresh mappings): the peak is the model and what moving one parameter needs. With the update
    on the host the masters are there in the end, and the peak is no more than that tenth above.
    """
    case = {"dtype": "float32", "width": 1024, "depth": 61, "steps": 0, "heap": True}
    cast = {**case, "cast_to": "bfloat16"}
    on_device, on_host, cast_on_host = run({**case, "offload": "none"}, case, cast)
    assert 255e6 <= on_device["model"] <= 257e6
    tenth = 0.1 * on_device["model"]
    assert on_device["start_peak"] - on_device["before"] <= tenth
    assert on_host["start_peak"] - on_host["start"] <= tenth
    assert on_host["start"] - on_host["before"] <= on_host["model"] + tenth
    # bf16 weights in place of fp32 ones, and fp32 masters: half of the model more.
    assert (
        cast_on_host["start_peak"] - cast_on_host["before"] <= 0.5 * cast_on_host["model"] + tenth
    )


class Slow(torch.autograd.Function):
    """The identity; `backward` gives the lanes time."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.02)
        return grad


class Block(nn.Linear):
    def forward(self, x):
        return super().forward(Slow.apply(x))


def most_alive(model: nn.Module, options: EngineOptions) -> int:
    """The most gradients that were alive at once in a backward."""
    storages: list[StorageWeakRef] = []
    counts: list[int] = []

    def note(param):
        storages.append(StorageWeakRef(param.grad.untyped_storage()))
        counts.append(sum(not storage.expired() for storage in storages))

    # Registered first, so called before forebay's own hook takes the gradient away.
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(note)
    model, optimizer = offload_with(model, torch.optim.AdamW(model.parameters()), options=options)
    for step in range(1, 3):
        storages.clear()
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        optimizer.synchronize()
        assert len(counts) == step * len(optimizer.state)
        assert all(storage.expired() for storage in storages), "a gradient outlived its step"
        optimizer.zero_grad()
    optimizer.close()
    return max(counts)


def test_gradients_go_as_soon_as_they_have_arrived():
    """With time for the copies, only the newest gradient and the one being sent are alive."""
    model = nn.Sequential(*[Block(64, 64, bias=False) for _ in range(12)])
    assert most_alive(model, EngineOptions(device="cpu")) <= 3


def test_gradients_wait_for_a_slow_link_in_bounded_memory():
    """Two of the largest units may wait; the newest one is a third, and one more is summed."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(12)])
    options = EngineOptions(device="cpu", fault=FaultScript(seed=1, max_delay_us=20_000))
    assert most_alive(model, options) <= 4


class Twice(nn.Module):
    """Runs one layer twice inside reentrant checkpoints: two addends in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256, bias=False)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


@pytest.mark.parametrize(("model", "backwards"), [(Twice, 1), (lambda: Twice().layer, 3)])
def test_sums_that_nobody_announced_take_16_bytes_too(model, backwards):
    """The landing place becomes wide when a second addend comes, and the narrow one goes."""
    model = model().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = offload_with(model, optimizer, options=EngineOptions(device="cpu"))
    ledger = optimizer.engine.ledger
    elements = 256 * 256
    assert ledger.bytes(Tier.HOST) == 14 * elements
    for _ in range(3):
        for _ in range(backwards):
            x = torch.ones(2, 256, dtype=torch.bfloat16, requires_grad=True)
            model(x).float().sum().backward()
        optimizer.step()
        optimizer.synchronize()
        optimizer.zero_grad()
    assert ledger.bytes(Tier.HOST) - ledger.bytes(Tier.HOST, Role.STAGING) == 16 * elements
    ledger.check()
    optimizer.close()
    del model, optimizer
    gc.collect()
    assert ledger.bytes(Tier.HOST) == 0
