"""Failures surface at waits, poison what depends on them, and nothing hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from unit.native_cases import Part, address


def _plan(core, nbytes=1000, piece_bytes=100):
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    plan = core.CopyPlan(piece_bytes)
    plan.append(address(target), address(source), nbytes)
    return plan, source, target


def _failing(core, fail_at=3):
    engine = core.ScriptedEngine(core.MemcpyEngine(), 1, 200, fail_at, "disk on fire")
    return core.Link(engine, [0], 2, -1, "failing")


def test_a_failure_surfaces_at_every_wait(core):
    link = _failing(core)
    plan, *keep = _plan(core)
    ticket = link.copy(plan)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="disk on fire"):
            ticket.wait(30)
    assert (ticket.done, ticket.failed) == (False, True)
    with pytest.raises(RuntimeError, match="disk on fire"):
        ticket.stream_wait(0)
    assert link.copy(plan).wait(30), keep  # the link itself goes on
    link.close()


def test_failures_poison_what_depends_on_them(core, pool):
    link = _failing(core, 0)
    plan, *keep = _plan(core)
    failed = link.copy(plan)
    part = Part(elements=1000)
    before = part.digest()
    update = part.update(core, pool, after=[failed])
    other = core.Link(core.MemcpyEngine())
    memory = np.zeros(1000, np.float32)
    ring = core.StagingRing(address(memory), 400, 2)
    fold = [(address(memory), address(memory), 10)]
    dependents = [
        update,
        pool.fold(fold, "float32", False, [failed]),
        pool.square_sums([(address(memory), 10)], "float32", [failed]),
        other.copy(plan, 0, [update]),
        other.copy(plan, 0, [], failed),
        other.copy_fold(pool, fold, "float32", False, ring, 0, [failed]),
    ]
    for ticket in dependents:
        with pytest.raises(RuntimeError, match="disk on fire"):
            ticket.wait(30)
    assert part.digest() == before, keep
    assert ring.slots_free == 2
    link.close()
    other.close()


def test_a_failed_sum_gives_its_slots_back(core, pool):
    link = _failing(core, 2)
    memory, sums = np.zeros(3000, np.float32), np.zeros(2000, np.float32)
    ring = core.StagingRing(address(memory), 400, 2)
    spans = [(address(sums), address(memory), 2000)]
    with pytest.raises(RuntimeError, match="disk on fire"):
        link.copy_fold(pool, spans, "float32", True, ring).wait(30)
    assert ring.slots_free == 2
    assert link.copy_fold(pool, spans, "float32", True, ring).wait(30)
    link.close()


def test_closing_fails_what_is_left(native):
    link = native.Link(native.ScriptedEngine(native.MemcpyEngine(), 1, 20_000), name="slow")
    pool = native.Pool(2, [])
    plan, *keep = _plan(native)
    copy = link.copy(plan)
    part = Part(elements=1000)
    update = part.update(native, pool, after=[copy])
    poisoned = native.Pool(1, [])
    late = part.update(native, poisoned, after=[update])
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        update.wait(30)
    with pytest.raises(RuntimeError, match="closed"):
        late.wait(30)
    link.close()
    with pytest.raises(RuntimeError, match="link 'slow' was closed"):
        copy.wait(30)
    assert copy.pieces_done == copy.pieces_issued, keep
    for again in (link, pool, poisoned):
        again.close()
        again.close()


def test_closed_things_refuse_work(core):
    pool, link = core.Pool(1, []), core.Link(core.MemcpyEngine())
    plan, *keep = _plan(core)
    memory = np.zeros(100, np.float32)
    ring = core.StagingRing(address(memory), 400, 1)
    spans = [(address(memory), address(memory), 1)]
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.fold(spans, "float32", True)
    with pytest.raises(RuntimeError, match="closed"):
        link.copy_fold(pool, spans, "float32", True, ring).wait(30)
    link.close()
    with pytest.raises(RuntimeError, match="closed"):
        link.copy(plan)
    assert keep


def test_waits_time_out(native):
    link = native.Link(native.ScriptedEngine(native.MemcpyEngine(), 5, 1_000_000))
    plan, *keep = _plan(native, 1000, 1000)
    ticket = link.copy(plan)
    begin = time.perf_counter()
    assert ticket.wait(0.0) is False
    assert ticket.wait(0.01) is False
    assert time.perf_counter() - begin < 1
    assert ticket.wait(30), keep
    link.close()


def test_waits_let_other_threads_run(native):
    link = native.Link(native.ScriptedEngine(native.MemcpyEngine(), 5, 1_000_000))
    plan, *keep = _plan(native, 1000, 1000)
    ticket = link.copy(plan)
    ticks = []
    thread = threading.Thread(target=lambda: ticks.extend(range(1000)))
    thread.start()
    assert ticket.wait(30)
    thread.join(30)
    assert len(ticks) == 1000, keep
    link.close()


def test_ctrl_c_ends_a_wait(native):
    link = native.Link(native.ScriptedEngine(native.MemcpyEngine(), 5, 1_000_000))
    plan, *keep = _plan(native, 1000, 100)
    ticket = link.copy(plan)
    # A shell starts background jobs with the signal ignored, and Python then leaves it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.perf_counter()
    try:
        with pytest.raises(KeyboardInterrupt):
            ticket.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.perf_counter() - begin < 5, keep


def test_completed_is_done(core):
    ticket = core.Ticket.completed()
    assert ticket.done
    assert ticket.wait()
    assert ticket.wait_issued()
    assert ticket.pieces == ticket.pieces_done == ticket.pieces_issued == 0
    ticket.stream_wait(0)


def test_cuda_without_a_driver_says_so(core):
    try:
        core.CudaEngine(0)
    except RuntimeError as error:
        assert "CUDA" in str(error)


def test_pinning_never_fails_a_pool(native):
    pool = native.Pool(2, [999_999])
    assert "999999" in pool.pinning_error
    pool.close()
    cpus = sorted(os.sched_getaffinity(0))
    pool = native.Pool(len(cpus), cpus)
    assert pool.pinning_error == ""
    assert Part(elements=1000).update(native, pool).wait(30)
    pool.close()


_AT_EXIT = """
import numpy as np, sys
from forebay import _core as core
source, target = np.ones(1 << 22, np.uint8), np.zeros(1 << 22, np.uint8)
plan = core.CopyPlan(4096)
plan.append(target.ctypes.data, source.ctypes.data, source.nbytes)
engine = core.ScriptedEngine(core.MemcpyEngine(), 1, 100)
link = core.Link(engine)
pool = core.Pool(2, [])
ticket = link.copy(plan)
sums = np.zeros(1 << 20, np.float32)
late = pool.fold([(sums.ctypes.data, target.ctypes.data, 1 << 20)], "float32", True, [ticket])
"""


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    "end",
    [
        "",
        "del link, pool, engine",
        "del pool; keep = ticket; sys.keep = (ticket, late)",
        "link.close(); del link; sys.keep = (ticket, late, pool)",
        "import threading; threading.Thread(target=ticket.wait, daemon=True).start()",
        "sys.exit(0)",
        "import os; pid = os.fork(); code = 0 if pid else (pool.close(), link.close());"
        " os.waitpid(pid, 0) if pid else None",
    ],
)
def test_the_interpreter_ends_quietly_with_work_pending(end):
    result = subprocess.run(
        [sys.executable, "-c", _AT_EXIT + end],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_a_forked_child_is_told(native):
    """The child has none of the threads: submitting raises, closing returns."""
    script = """
import os, numpy as np
from forebay import _core as core
pool, link = core.Pool(2, []), core.Link(core.MemcpyEngine())
pid = os.fork()
if pid == 0:
    failures = 0
    for submit in (lambda: pool.square_sums([], "float32"), lambda: link.copy(core.CopyPlan(1))):
        try:
            submit()
        except RuntimeError as error:
            failures += "fork" in str(error)
    del pool, link
    os._exit(failures)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
assert pool.square_sums([], "float32").wait(10)
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout.strip()) == (0, "2"), result.stderr
