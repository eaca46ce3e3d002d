"""State in files and the end of a process: killed, stopped, or out of room; nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from house.tree import ROOT

pytestmark = pytest.mark.timeout(120)

SETUP = """
import os, resource, sys, time
from pathlib import Path
import torch
from torch import nn
import forebay

folder = Path(sys.argv[1])

def config(**more):
    offload = {"device": "nvme", "nvme_path": str(folder / "state"), "buffer_count": 2,
               "buffer_size": 65536}
    return {"train_batch_size": 3, "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 2, "offload_optimizer": offload | more}}

def make(seed=0, **more):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 20_000), nn.Tanh(), nn.Linear(20_000, 5))
    return forebay.initialize(model=model, config=config(**more))[0]

def step(engine, number):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
    engine.backward((engine(x) - 1.0).pow(2).mean())
    engine.step()

def say(*words):
    print(*words, flush=True)
"""


@pytest.fixture
def folder(tmp_path):
    """Holds `state`, which is empty whatever happens."""
    (tmp_path / "state").mkdir()
    yield tmp_path
    if (tmp_path / "state").exists():
        assert list((tmp_path / "state").iterdir()) == []


def start(body: str, folder: Path) -> subprocess.Popen[str]:
    """A process that runs the body."""
    return subprocess.Popen(
        [sys.executable, "-c", SETUP + body, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )


def end(process: subprocess.Popen[str], seconds: float = 60) -> tuple[int, str, str]:
    """Its exit code and what it said."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


FOREVER = """
engine = make()
number = 0
while True:
    step(engine, number)
    number += 1
    if number == 3:
        say("training")
"""


@pytest.mark.parametrize(
    "sign",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_by_a_process_that_is_stopped(folder, sign):
    free = os.statvfs(folder).f_bavail
    process = start(FOREVER, folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "training\n"
    assert list((folder / "state").iterdir()) == []  # not even while it runs
    process.send_signal(sign)
    code, _, _ = end(process)
    assert code != 0
    # the system has the space again; others use the disk too, so only roughly
    assert os.statvfs(folder).f_bavail > free - 200_000


CHECKPOINTED = """
engine = make()
for number in range(3):
    step(engine, number)
engine.save_checkpoint(str(folder / "checkpoints"))
say("saved")
{fault}
began = time.monotonic()
try:
    for number in range(3, 9):
        step(engine, number)
    engine.synchronize()
finally:
    say("seconds", time.monotonic() - began)
"""


def _is_told_and_survived(folder: Path, fault: str, *, told: str) -> None:
    process = start(CHECKPOINTED.replace("{fault}", fault), folder)
    code, out, err = end(process)
    assert code == 1, err
    lines = out.splitlines()
    assert lines[0] == "saved"
    assert float(lines[1].split()[1]) < 10
    last = err.strip().splitlines()[-2:]
    assert last[0].startswith("forebay.errors.TransferError: "), err
    assert told in err
    assert "hint: " in last[1]
    assert "last checkpoint" in last[1]
    here: dict[str, Any] = {}
    exec(SETUP.replace("sys.argv[1]", repr(str(folder))), here)  # the same model, in this process
    engine = here["make"](seed=1)
    engine.load_checkpoint(str(folder / "checkpoints"))
    assert engine.global_steps == 3
    here["step"](engine, 3)
    engine.close()


def test_a_limit_on_file_size_in_the_middle_of_a_run(folder):
    """A real error of the kernel (EFBIG): the drive takes no more where it took before."""
    _is_told_and_survived(
        folder,
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))",
        told="File too large (errno 27)",
    )


def test_a_byte_that_changed_in_the_middle_of_a_run(folder):
    """Flipped through /proc/self/fd, once the state has left the buffers."""
    fault = """
engine.synchronize()
found = [fd for fd in range(3, 200) if os.path.lexists(f"/proc/self/fd/{fd}")
         and os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder / "state"))]
with open(f"/proc/self/fd/{found[0]}", "r+b", buffering=0) as file:
    file.seek(4000); byte = file.read(1); file.seek(4000); file.write(bytes([byte[0] ^ 4]))
    os.fsync(file.fileno())
"""
    _is_told_and_survived(folder, fault, told="master of 0.weight is not what was written")


def test_a_limit_on_file_size_at_start(folder):
    body = """
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    make()
except forebay.StorageError as error:
    assert isinstance(error, OSError)
    say(error)
    sys.exit(1)
"""
    code, out, err = end(start(body, folder))
    assert code == 1, err
    assert "cannot reserve 2.3 MiB" in out
    assert "File too large (errno 27)" in out


def test_a_full_file_system_at_start(folder):
    """A tmpfs of 1 MiB, where mounting is allowed."""
    mount = folder / "state"
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("this process may not mount a file system")
    try:
        code, _, err = end(start("make()", folder))
        assert code == 1
        assert "state takes 2.3 MiB in" in err
        assert "which has 1.0 MiB left" in err
        assert list(mount.iterdir()) == []
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_folder_that_may_not_be_written(folder):
    body = """
if os.geteuid() == 0:
    make(device="none")  # what is imported late may not be readable by nobody
    os.seteuid(65534)
make()
"""
    (folder / "state").chmod(0o555)
    code, _, err = end(start(body, folder))
    (folder / "state").chmod(0o755)
    assert code == 1
    assert "StorageError: cannot make a state file in" in err
    assert "Permission denied (errno 13)" in err


TOGETHER = """
engine = make(seed=SEED)
for number in range(12):
    step(engine, number)
state = engine.module.state_dict()
say(sum(float(value.double().sum()) for value in state.values()).hex())
"""


@pytest.mark.slow
def test_two_jobs_on_one_path_never_meet(folder):
    bodies = [TOGETHER.replace("SEED", str(seed)) for seed in (0, 1)]
    alone = [end(start(body, folder))[1] for body in bodies]
    both = [start(body, folder) for body in bodies]
    together = [end(process)[1] for process in both]
    assert together == alone
    assert alone[0] != alone[1]
