"""Host ceilings from fake control groups, and one warning when the machine swaps."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from forebay.errors import BudgetError, ForebayWarning
from forebay.hardware.cgroup import cpu_quota, memory_limit
from forebay.hardware.limits import (
    HostLimit,
    SwapWatch,
    host_ceiling,
    locked_memory_limit,
    machine_bytes,
    memory_available_bytes,
    memory_total_bytes,
)

MIB = 1 << 20


class Machine:
    """Fake /proc and /sys roots."""

    def __init__(self, root: Path) -> None:
        self.sys, self.proc = root / "sys", root / "proc"
        self.groups = self.sys / "fs/cgroup"
        self.groups.mkdir(parents=True)
        (self.proc / "self").mkdir(parents=True)

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def group(self, path: str, **limits: str) -> None:
        """Version 2: the process's group, and files in it (`memory_max` is `memory.max`)."""
        self.write(self.proc / "self/cgroup", f"0::{path}")
        for name, text in limits.items():
            self.write(self.groups / path.lstrip("/") / name.replace("_", "."), text)

    def available(self, nbytes: int) -> None:
        total = f"MemTotal: {4 * nbytes // 1024} kB\nMemFree: 1 kB\n"
        self.write(self.proc / "meminfo", f"{total}MemAvailable:  {nbytes // 1024} kB")

    def counters(self, swapped: int, faults: int) -> None:
        self.write(self.proc / "vmstat", f"nr_free_pages 5\npswpin {swapped}\npswpout 9")
        fields = " ".join(["S", *["0"] * 8, str(faults), *["0"] * 30])
        self.write(self.proc / "self/stat", f"17 (py thon) 3) {fields}")

    def limit(self) -> int | None:
        found = memory_limit(self.groups, proc=self.proc)
        return None if found is None else found.nbytes

    def ceiling(self, budget=None):
        return host_ceiling(budget, sys=self.sys, proc=self.proc)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_version_2_limit(machine):
    machine.group("/job", memory_max=str(256 * MIB))
    assert machine.limit() == 256 * MIB


def test_no_limit(machine):
    assert machine.limit() is None
    machine.group("/job", memory_max="max", memory_high="max")
    assert machine.limit() is None


def test_an_ancestors_limit_binds(machine):
    machine.group("/a/b/c", memory_max="max")
    machine.write(machine.groups / "a/memory.max", str(64 * MIB))
    machine.write(machine.groups / "a/b/memory.max", str(128 * MIB))
    assert machine.limit() == 64 * MIB


def test_the_stalling_limit_counts(machine):
    machine.group("/job", memory_max=str(256 * MIB), memory_high=str(100 * MIB))
    assert machine.limit() == 100 * MIB


@pytest.mark.parametrize("path", ["/", "/docker/8f3c", "/../other"])
def test_inside_a_container_the_root_is_the_group(machine, path):
    """The host's path is not visible there, or leaves the namespace."""
    machine.group(path)
    machine.write(machine.groups / "memory.max", str(32 * MIB))
    assert machine.limit() == 32 * MIB


@pytest.mark.parametrize("path", ["/job", "/not/visible"])
def test_version_1_limit(machine, path):
    machine.write(machine.proc / "self/cgroup", f"9:cpu,cpuacct:/x\n4:memory:{path}\n0::/")
    folder = machine.groups / "memory"
    machine.write(folder / "memory.limit_in_bytes", "9223372036854771712")
    (folder / "job").mkdir()
    target = folder / "job" if path == "/job" else folder
    machine.write(target / "memory.limit_in_bytes", str(48 * MIB))
    assert machine.limit() == 48 * MIB


def test_version_1_spelling_of_no_limit(machine):
    machine.write(machine.groups / "memory/memory.limit_in_bytes", "9223372036854771712")
    assert machine.limit() is None


def test_cpu_quota_in_both_versions(machine):
    assert cpu_quota(machine.groups, proc=machine.proc) is None
    machine.group("/job", cpu_max="max 100000")
    assert cpu_quota(machine.groups, proc=machine.proc) is None
    machine.group("/job", cpu_max="150000 100000")
    assert cpu_quota(machine.groups, proc=machine.proc) == 1.5
    machine.write(machine.groups / "cpu/cpu.cfs_quota_us", "100000")
    machine.write(machine.groups / "cpu/cpu.cfs_period_us", "100000")
    assert cpu_quota(machine.groups, proc=machine.proc) == 1.0
    machine.write(machine.groups / "cpu/cpu.cfs_quota_us", "-1")
    assert cpu_quota(machine.groups, proc=machine.proc) == 1.5


def test_ceiling_is_the_lower_of_group_and_budget(machine):
    machine.available(16 * MIB)
    machine.group("/job", memory_max=str(256 * MIB))
    assert machine.ceiling(64 * MIB).limit is HostLimit.HOST_BUDGET
    assert machine.ceiling(64 * MIB).nbytes == 64 * MIB
    assert machine.ceiling(512 * MIB).limit is HostLimit.CGROUP
    assert machine.ceiling(512 * MIB).source.endswith("job/memory.max")


def test_available_memory_refuses_only_without_a_budget(machine):
    """The memory of some virtual machines grows as it is touched."""
    machine.available(16 * MIB)
    assert machine.ceiling().limit is HostLimit.AVAILABLE
    assert machine.ceiling().nbytes == 16 * MIB
    assert machine.ceiling(64 * MIB).nbytes == 64 * MIB


def test_no_limit_known_refuses_nothing(machine):
    ceiling = machine.ceiling()
    assert (ceiling.nbytes, ceiling.limit) == (None, HostLimit.NONE)
    ceiling.require(1 << 60, what="anything")


def test_a_plan_past_the_group_limit_is_refused_with_numbers(machine):
    """Otherwise the kernel kills the process without a word."""
    machine.available(1 << 40)
    machine.group("/job", memory_max=str(256 * MIB))
    ceiling = machine.ceiling()
    ceiling.require(256 * MIB, what="optimizer state")
    with pytest.raises(BudgetError) as refused:
        ceiling.require(300 * MIB, what="optimizer state")
    text = str(refused.value)
    for part in ("300.0 MiB", str(300 * MIB), "256.0 MiB", "control group", "memory.max", "hint: "):
        assert part in text
    with pytest.raises(BudgetError, match="hint: use less"):
        ceiling.require(300 * MIB, what="optimizer state", hint="use less")


def test_real_machine_numbers_make_sense():
    total, available = memory_total_bytes(), memory_available_bytes()
    if total is not None and available is not None:
        assert 0 < available <= total
    locked = locked_memory_limit()
    assert locked is None or locked >= 0


def polled(watch):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch.look()
    return [warning.category for warning in caught]


def test_the_machine_has_no_more_than_its_control_group(machine):
    machine.available(64 * MIB)
    assert machine_bytes(sys=machine.sys, proc=machine.proc) == 256 * MIB
    machine.group("/job", memory_max=str(100 * MIB))
    assert machine_bytes(sys=machine.sys, proc=machine.proc) == 100 * MIB


def test_swapping_is_said_once(machine):
    machine.counters(0, 100)
    watch = SwapWatch(machine.proc)
    assert polled(watch) == []
    machine.counters(500_000, 400_000)
    assert polled(watch) == [ForebayWarning]
    machine.counters(900_000, 900_000)
    assert polled(watch) == []


@pytest.mark.parametrize(("swapped", "faults"), [(0, 500_000), (500_000, 0), (900, 900)])
def test_neither_file_reading_nor_a_neighbours_swapping_warns(machine, swapped, faults):
    machine.counters(10, 10)
    watch = SwapWatch(machine.proc)
    machine.counters(10 + swapped, 10 + faults)
    assert polled(watch) == []


def test_an_unreadable_proc_disables_the_watch(machine):
    watch = SwapWatch(machine.proc)
    assert polled(watch) == []
    machine.counters(10**9, 10**9)
    assert polled(watch) == []


def test_a_poll_looks_every_few_seconds(machine, monkeypatch):
    """Reading /proc at every step would cost more than the step's own bookkeeping."""
    now = 100.0
    monkeypatch.setattr("forebay.hardware.limits.time.monotonic", lambda: now)
    machine.counters(0, 100)
    watch = SwapWatch(machine.proc)
    machine.counters(500_000, 400_000)
    now += 1.0
    watch.poll()  # too soon: a warning would be an error here
    now += 10.0
    with pytest.warns(ForebayWarning, match="swapped"):
        watch.poll()
