"""The end of a process, orderly or not: no hang, no message of a half-dead object, no leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from house.tree import ROOT

pytestmark = pytest.mark.timeout(120)

SETUP = """
import sys, time, torch
from torch import nn
import forebay
from forebay.engine import EngineOptions, offload_with
from forebay.links import FaultScript

def make(**options):
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    source = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return offload_with(model, source, options=EngineOptions(device="cpu", **options))

def backward(model):
    model(torch.ones(2, 8)).pow(2).sum().backward()

late = dict(fault=FaultScript(seed=0, max_delay_us=300_000))
"""


def _start(body: str, **environment: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", SETUP + body],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )


def _end(process: subprocess.Popen[str], seconds: float = 60) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


ENDINGS = {
    "closed": "model, optimizer = make(); backward(model); optimizer.step(); optimizer.close()",
    "forgotten": "model, optimizer = make(); backward(model); optimizer.step()",
    "work_pending": "model, optimizer = make(**late); backward(model); optimizer.step()",
    "gradients_pending": "model, optimizer = make(**late); backward(model)",
    "in_a_function": """
def main():
    model, optimizer = make(**late)
    backward(model)
    optimizer.step()
main()
""",
    "in_a_cycle": """
class Holder: pass
holder = Holder(); holder.it = holder
holder.model, holder.optimizer = make(**late)
backward(holder.model); holder.optimizer.step()
del holder
""",
    "failed": """
model, optimizer = make(fault=FaultScript(seed=0, fail_at=0, fail_text="broken"))
backward(model)
try:
    optimizer.step(); optimizer.synchronize()
except forebay.TransferError:
    pass
""",
    "refused": """
try:
    make(host_budget=1)
except forebay.BudgetError:
    pass
""",
}


# Each is a process that imports torch: the quick run has those that have failed before.
QUICK = {"work_pending", "in_a_cycle", "failed"}


@pytest.mark.parametrize(
    "ending",
    [pytest.param(e, marks=() if e in QUICK else pytest.mark.slow) for e in ENDINGS],
)
def test_interpreter_ends_quietly(ending: str) -> None:
    code, out, err = _end(_start(ENDINGS[ending]))
    assert (code, out, err) == (0, "", "")


def test_dropped_engines_do_not_crash() -> None:
    """Engines that nobody closed are collected while their copies are on their way."""
    body = """
import gc
for number in range(8):
    model, optimizer = make(fault=FaultScript(seed=number, max_delay_us=5000), unit_elements=1)
    backward(model)
    optimizer.step()
    del model, optimizer
    gc.collect()
print("alive")
"""
    assert _end(_start(body)) == (0, "alive\n", "")


@pytest.mark.slow
def test_uncaught_failure_is_one_error() -> None:
    body = """
model, optimizer = make(fault=FaultScript(seed=0, fail_up_at=0, fail_text="broken"))
backward(model)
optimizer.step()
model(torch.ones(2, 8))
"""
    code, _, err = _end(_start(body))
    assert code == 1
    assert err.rstrip().splitlines()[-2].startswith("forebay.errors.TransferError: the update of")
    assert err.rstrip().splitlines()[-1].startswith("hint: ")
    assert "Exception ignored" not in err


def _await(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.strip() == word, _end(process)


def test_interrupt_ends_a_wait() -> None:
    """Ctrl-C reaches a thread that waits natively within a fraction of a second."""
    body = """
model, optimizer = make(fault=FaultScript(seed=3, max_delay_us=3_000_000), unit_elements=1)
backward(model)
optimizer.step()
print("waiting", flush=True)
begun = time.monotonic()
try:
    model.state_dict()
except KeyboardInterrupt:
    print("interrupted", round(time.monotonic() - begun), flush=True)
"""
    process = _start(body)
    _await(process, "waiting")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    code, out, err = _end(process)
    assert (code, err) == (0, "")
    if out:  # on a slow machine the wait may have been over
        assert out.split()[0] == "interrupted"
        assert int(out.split()[1]) <= 3


@pytest.mark.parametrize("handler", ["python", pytest.param("none", marks=pytest.mark.slow)])
def test_terminated_in_the_middle_of_steps(handler: str) -> None:
    """Gone within 10 s of SIGTERM, by the system's default or through a handler that exits."""
    install = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"
    body = f"""
{install if handler == "python" else ""}
model, optimizer = make(fault=FaultScript(seed=0, max_delay_us=2000))
for number in range(1_000_000):
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    if number == 3:
        print("training", flush=True)
"""
    process = _start(body)
    _await(process, "training")
    time.sleep(0.3)
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, _, err = _end(process, seconds=10)
    assert time.monotonic() - begun < 10
    assert code == (7 if handler == "python" else -signal.SIGTERM)
    assert "Exception ignored" not in err
    assert not {p for p in before if "forebay" in p.name}


def test_no_compiler_no_toolkit() -> None:
    """Nothing is compiled on the training path, and no CUDA toolkit is looked for."""
    body = "model, optimizer = make(); backward(model); optimizer.step(); optimizer.close()"
    process = _start(body, CC="/bin/false", CXX="/bin/false", CUDA_HOME="/nonexistent", PATH="")
    assert _end(process) == (0, "", "")
