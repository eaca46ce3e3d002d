"""Host memory stays within its budget while the state in files is four times as large."""

from __future__ import annotations

import pytest

from numerics.test_memory import MIB, placed, run

pytestmark = pytest.mark.timeout(200)

# 25 million parameters: 302 MB of state, and 50 MB of bf16 gradients that land in host memory.
CASE = {"offload": "nvme", "width": 1024, "depth": 24, "steps": 3}
STATE = 12 * 24 * (1024 * 1024 + 1024)
# One gradient of the largest layer, what Python and the heap take meanwhile, and workspaces of
# torch's threads: 20 to 54 MB in 40 runs of one and the same ledger. Without the budget it would be
# 226 MB more.
MEANWHILE = 64 * MIB


def _check(numbers: dict, budget: int) -> None:
    assert placed(numbers, "host") <= budget
    assert placed(numbers, "nvme") + placed(numbers, "host:hp") >= 0.8 * STATE
    # what was resident before, and the weights' move out of the model, are not the host tier's
    moved = placed(numbers, "device") - numbers["model"]
    grown = numbers["peak"] - numbers["before"] - moved
    assert grown <= budget + MEANWHILE


def test_a_budget_of_a_quarter_of_the_state():
    budget = STATE // 4
    (numbers,) = run({**CASE, "host_budget": budget})
    _check(numbers, budget)
    # as much of it stays in memory as fits, of a unit some pieces
    assert placed(numbers, "host") > 0.95 * budget


def test_a_budget_of_a_quarter_of_the_state_with_weights_in_files():
    """Weights are in neither memory: the pool on the device holds two layers of 24."""
    budget = STATE // 4
    (numbers,) = run({**CASE, "host_budget": budget, "parameters": "nvme"})
    _check(numbers, budget)
    assert numbers["ledger"]["nvme:lp_params"] >= numbers["model"]
    assert placed(numbers, "device") < numbers["model"] // 8
    assert max(numbers["resident"]) <= numbers["before"] - numbers["model"] + budget + MEANWHILE


@pytest.mark.slow
def test_swap_buffers_scale_with_the_budget():
    """64 MiB and a model of 40 MB: buffers take 8 MiB at most, and the run passes."""
    budget = 64 * MIB
    (numbers,) = run({**CASE, "depth": 19, "host_budget": budget})
    assert numbers["model"] > 39_000_000
    assert numbers["ledger"]["host:staging"] <= 8 * MIB + 5 * MIB  # and 4 MiB of scratch
    assert placed(numbers, "host") <= budget
