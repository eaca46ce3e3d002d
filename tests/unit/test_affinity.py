"""Cores per rank: from affinity, topology and quota, never from OMP_NUM_THREADS."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forebay.hardware import affinity
from forebay.hardware.affinity import Core, Topology, allowed_cpus, parse_cpu_list


def machine(root: Path, *, siblings: dict[int, str], nodes: dict[int, str]) -> Path:
    """Write a sysfs tree: SMT siblings of each CPU, CPUs of each NUMA node."""
    for cpu, text in siblings.items():
        folder = root / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    for node, text in nodes.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
    return root


def read(root: Path, allowed) -> Topology:
    return Topology.read(root, proc=root / "proc", allowed=lambda: allowed)


def plain(cores: int, *, per_node: int | None = None) -> Topology:
    """Cores 0.. of one CPU each."""
    per_node = per_node or cores
    return Topology(cores=tuple(Core(cpus=(i,), node=i // per_node) for i in range(cores)))


@pytest.fixture
def two_sockets(tmp_path):
    """2 sockets x 4 cores x 2 threads, siblings 8 apart, as Linux usually numbers them."""
    siblings = {cpu: f"{cpu % 8},{cpu % 8 + 8}" for cpu in range(16)}
    return machine(tmp_path, siblings=siblings, nodes={0: "0-3,8-11", 1: "4-7,12-15"})


def test_two_sockets_with_smt_use_one_thread_per_core(two_sockets):
    topology = read(two_sockets, range(16))
    assert [core.cpus for core in topology.cores[:2]] == [(0, 8), (1, 9)]
    assert [core.node for core in topology.cores] == [0] * 4 + [1] * 4
    share = topology.share(reserve_for_launch=0)
    assert share.cpus == (0, 1, 2, 3, 4, 5, 6, 7)
    assert share.threads == 8
    assert "8 SMT siblings idle" in share.summary


def test_ranks_keep_to_their_node(two_sockets):
    topology = read(two_sockets, range(16))
    shares = [topology.share(r, local_ranks=2, reserve_for_launch=0) for r in range(2)]
    assert [share.cpus for share in shares] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_interleaved_numbering_is_sorted_by_node(tmp_path):
    """Even CPUs on node 0, odd ones on node 1."""
    siblings = {cpu: str(cpu) for cpu in range(8)}
    root = machine(tmp_path, siblings=siblings, nodes={0: "0,2,4,6", 1: "1,3,5,7"})
    topology = read(root, range(8))
    shares = [topology.share(r, local_ranks=2, reserve_for_launch=0) for r in range(2)]
    assert [share.cpus for share in shares] == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_gaps_in_cpu_and_node_numbers(tmp_path):
    """Offline CPUs leave gaps; nodes are 0 and 8 on some machines."""
    siblings = {cpu: f"{cpu // 4 * 4}-{cpu // 4 * 4 + 3}" for cpu in (0, 1, 8, 9, 64, 65, 72, 73)}
    root = machine(tmp_path, siblings=siblings, nodes={0: "0-15", 8: "64-79"})
    topology = read(root, siblings)
    assert [core.cpus for core in topology.cores] == [(0, 1), (8, 9), (64, 65), (72, 73)]
    assert [core.node for core in topology.cores] == [0, 0, 8, 8]


def test_only_allowed_siblings_count(two_sockets):
    topology = read(two_sockets, {1, 9, 10})
    assert [core.cpus for core in topology.cores] == [(1, 9), (10,)]


@pytest.mark.parametrize("cores", [1, 2, 3, 5, 7, 16, 96])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_core_belongs_to_exactly_one_rank(cores, ranks):
    topology = plain(cores)
    shares = [
        topology.share(rank, local_ranks=ranks, reserve_for_launch=0) for rank in range(ranks)
    ]
    used = [cpu for share in shares for cpu in share.cpus]
    assert set(used) == set(range(cores))
    assert all(share.threads == len(share.cpus) >= 1 for share in shares)
    if ranks <= cores:
        assert len(used) == cores
        sizes = [share.threads for share in shares]
        assert max(sizes) - min(sizes) <= 1


def test_equal_nodes_are_never_straddled():
    topology = plain(14, per_node=7)
    for rank in range(4):
        share = topology.share(rank, local_ranks=4, reserve_for_launch=0)
        assert len({topology.cores[cpu].node for cpu in share.cpus}) == 1


@pytest.mark.parametrize(
    ("cores", "reserve", "threads"),
    [(1, None, 1), (2, None, 2), (3, None, 2), (16, None, 15), (16, 0, 16), (2, 1, 1), (1, 5, 1)],
)
def test_a_core_is_left_to_the_launching_thread_where_there_are_several(cores, reserve, threads):
    share = plain(cores).share(reserve_for_launch=reserve)
    assert share.threads == threads
    assert ("launching thread" in share.summary) == (threads < cores)


def test_a_machine_of_one_smt_core_uses_both_threads(tmp_path):
    """A 2-CPU virtual machine is often that: nothing may stay idle there."""
    root = machine(tmp_path, siblings={0: "0-1", 1: "0-1"}, nodes={0: "0-1"})
    assert read(root, {0, 1}).share().cpus == (0, 1)


def test_launchers_thread_setting_is_ignored(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert plain(2).share().threads == 2


def test_one_allowed_core_and_two_ranks_on_two_cores():
    """`taskset -c 0` gives one thread; two ranks on two cores get one each."""
    assert plain(1).share().threads == 1
    shares = [plain(2).share(rank, local_ranks=2) for rank in range(2)]
    assert [share.cpus for share in shares] == [(0,), (1,)]


def test_more_ranks_than_cores_share_them_evenly():
    shares = [plain(2).share(rank, local_ranks=8) for rank in range(8)]
    assert [share.cpus for share in shares] == [(0,)] * 4 + [(1,)] * 4


def test_quota_limits_threads_and_forbids_pinning(tmp_path):
    """Under `--cpus 4` every container of a machine would pin to the same cores."""
    siblings = {cpu: str(cpu) for cpu in range(64)}
    root = machine(tmp_path, siblings=siblings, nodes={0: "0-63"})
    group = root / "fs/cgroup/job"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("400000 100000\n")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/job\n")
    topology = read(root, range(64))
    assert topology.quota == 4.0
    share = topology.share()
    assert (share.threads, share.cpus) == (3, ())
    assert "control group" in share.summary
    assert topology.share(1, local_ranks=8).threads == 1


def test_quota_above_the_mask_changes_nothing():
    topology = Topology(cores=plain(4).cores, quota=32.0)
    assert topology.share() == plain(4).share()


def test_nothing_under_sys_means_one_core_per_cpu(tmp_path):
    topology = read(tmp_path, {3, 5})
    assert topology.cores == (Core(cpus=(3,), node=0), Core(cpus=(5,), node=0))


def test_affinity_that_is_not_permitted_is_no_error(monkeypatch):
    def refuse(pid):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(affinity.os, "sched_getaffinity", refuse)
    monkeypatch.setattr(affinity.os, "cpu_count", lambda: 3)
    assert allowed_cpus() == {0, 1, 2}
    assert Topology.read().share().threads >= 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_the_real_mask_is_obeyed(monkeypatch):
    """Whatever a launcher says of threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = os.sched_getaffinity(0)
    one = min(before)
    os.sched_setaffinity(0, {one})
    try:
        assert Topology.read().share().threads == 1
    finally:
        os.sched_setaffinity(0, before)
    assert sum(len(core.cpus) for core in Topology.read().cores) == len(before)


def test_a_rank_outside_its_range_is_refused():
    with pytest.raises(ValueError, match="local rank 2 of 2"):
        plain(4).share(2, local_ranks=2)


@pytest.mark.parametrize(
    ("text", "cpus"), [("", []), ("0", [0]), ("0-2,8,10-11\n", [0, 1, 2, 8, 10, 11])]
)
def test_kernel_lists(text, cpus):
    assert sorted(parse_cpu_list(text)) == cpus
