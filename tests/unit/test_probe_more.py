"""What a probe finds of drives, ranks and the places where a machine limits a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from forebay.accelerators.select import accelerator_for
from forebay.cli.main import main
from forebay.errors import ConfigError, StorageError
from forebay.hardware.catalog import CATALOG
from forebay.hardware.profile import Drives, read_profile
from forebay.hardware.rates import DriveUse
from forebay.hardware.storage import Storage
from forebay.plan.fluid import Meeting, Task, run
from forebay.probe.device import device_copy, matrix_rates
from forebay.probe.environment import State, report
from forebay.probe.folder import both_at_once, measure_drive
from forebay.probe.layer import _size_for, layer_rates
from forebay.probe.system import HUGE_PAGES, read_system


def test_a_drive_is_written_and_read_and_left_as_it_was(tmp_path):
    found = measure_drive(tmp_path, nbytes=24 << 20)
    assert found.read > 1e6
    assert found.write > 1e6
    assert found.count == 1
    assert list(tmp_path.iterdir()) == []


def test_drives_that_cannot_be_measured(tmp_path):
    with pytest.raises(ConfigError, match="is no folder"):
        measure_drive(tmp_path / "none")
    with pytest.raises(StorageError, match=r"the measurement takes 64.0 PiB in .* left"):
        measure_drive(tmp_path, nbytes=1 << 56)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("exchanged", [0.4, 1.5, 2.0, 2.1])
@pytest.mark.parametrize(("read", "write"), [(6.0, 2.0), (2.0, 6.0), (2.0, 2.0)])
def test_an_exchange_is_forecast_as_long_as_it_was_measured(read, write, exchanged):
    """Whichever direction is the faster; a drive never does more at once than alone."""
    meeting = Meeting(
        lanes=frozenset("rw"), total=both_at_once(read=read, write=write, exchanged=exchanged)
    )
    tasks = [Task(lane=lane, work=1.0, rate=rate) for lane, rate in (("r", read), ("w", write))]
    spans = run(tasks, memory=1e9, meetings=[meeting])
    seconds = 1 / min(exchanged, 2.0)
    assert max(span.end for span in spans) == pytest.approx(seconds)
    # A run that does the same teaches that the drive is as fast as its profile says.
    drives = Drives(count=1, capacity_bytes=1, read=read, write=write, both=meeting.total)
    use = DriveUse(bytes_read=1, read_seconds=seconds, bytes_written=1, write_seconds=seconds)
    assert use.times_as_long(drives, sharers=1) == pytest.approx(1.0)


def test_a_report_names_limits_and_their_remedies(tmp_path):
    system, proc = tmp_path / "sys", tmp_path / "proc"
    group = system / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("150000 100000\n")
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/\n")
    for node in range(2):
        folder = system / "devices" / "system" / "node" / f"node{node}"
        folder.mkdir(parents=True)
        cpus = sorted(os.sched_getaffinity(0))
        (folder / "cpulist").write_text(f"{cpus[node] if node < len(cpus) else 99}\n")
    found = {one.part: one for one in report(sys=system, proc=proc)}
    assert found["processor time"].state is State.LIMITED
    assert "1.5 processors" in found["processor time"].detail
    assert found["GPUDirect Storage"].state is State.MISSING
    assert "the device is no GPU" in found["GPUDirect Storage"].detail or torch.cuda.is_available()
    for part in ("processor time", "GPUDirect Storage", "NUMA", "drive"):
        assert found[part].remedy or found[part].state is State.WORKS
    if len(os.sched_getaffinity(0)) > 1:
        assert "2 nodes" in found["NUMA"].detail


def test_a_profile_says_what_the_system_allowed(tmp_path):
    system, proc = tmp_path / "sys", tmp_path / "proc"
    group = system / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("150000 100000\n")
    (group / "memory.max").write_text(f"{3 << 30}\n")
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/\n")
    pages = system / HUGE_PAGES
    pages.parent.mkdir(parents=True)
    pages.write_text("always [madvise] never\n")
    found = read_system(torch.device("cpu"), sys=system, proc=proc)
    assert (found.huge_pages, found.direct_storage) == ("madvise", "missing")
    assert (found.memory_limit_bytes, found.processor_limit) == (3 << 30, 1.5)
    bare = read_system(torch.device("cpu"), sys=tmp_path / "none", proc=tmp_path / "none")
    assert bare.huge_pages == "unknown"
    assert bare.memory_limit_bytes is bare.processor_limit is None


def test_the_device_is_measured():
    accelerator = accelerator_for(torch.device("cpu"))
    rates = matrix_rates(accelerator)
    assert {rate.dtype for rate in rates} == {"float32", "bfloat16"}
    assert all(rate.flops > 1e6 for rate in rates)
    assert device_copy(accelerator) > 1e7


def test_a_layers_operations_are_measured():
    found = layer_rates(accelerator_for(torch.device("cpu")))
    assert found.dtype == "float32"
    kinds = [field.name for field in fields(found) if field.name not in {"dtype", "issue"}]
    for kind in kinds:
        rate = getattr(found, kind)
        assert 1e6 < rate.forward < 1e14, kind
        assert 1e6 < rate.backward < 1e14, kind
    assert 1e-6 < found.issue.forward < 1
    assert 1e-6 < found.issue.backward < 1


@pytest.mark.parametrize(("major", "dtype"), [(7, torch.float16), (8, torch.bfloat16)])
def test_a_device_is_measured_in_the_sixteen_bits_that_it_computes(monkeypatch, major, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (major, 0))
    assert _size_for(torch.device("cuda", 0)).dtype is dtype
    assert _size_for(torch.device("cpu")).dtype is torch.float32


@pytest.mark.slow
def test_ranks_measure_between_each_other(tmp_path):
    """Two processes under torchrun: one profile, with what they reach."""
    path = tmp_path / "profile.json"
    source = Path(__file__).parents[2] / "src"
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
         "-m", "forebay", "probe", "--device", "cpu", "--quick", "--output", str(path)],
        env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    network = read_profile(path).network
    assert network.inside > 1e6
    assert network.across is None
    assert run.stderr.count("all-gathers between ranks") == 1


def test_the_command_refuses_a_drive_that_is_not_there_and_reports(tmp_path, capsys):
    assert main(["probe", "--device", "cpu", "--drive", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["probe", "--report", "--json"]) == 0
    parts = {row["part"] for row in json.loads(capsys.readouterr().out)}
    assert {"NUMA", "GPUDirect Storage", "drive", "processor time", "memlock"} <= parts


def test_a_folder_in_host_memory_is_measured_with_a_warning(capsys, monkeypatch, tmp_path):
    memory = Storage(kind="tmpfs", source="none", free_bytes=1, is_rotating=None)
    monkeypatch.setattr("forebay.cli.probe.storage_of", lambda _path: memory)
    words = ["probe", "--device", "cpu", "--drive", str(tmp_path)]
    for found, warnings in ((CATALOG["h200"], 1), (None, 0)):  # of the first rank, of others
        monkeypatch.setattr("forebay.probe.measuring.measure_all", lambda *_, _f=found, **__: _f)
        assert main(words) == 0
        told = capsys.readouterr().err
        assert told.count(f"warning: {tmp_path}: tmpfs is host memory") == warnings
