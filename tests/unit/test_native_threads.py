"""Threads of the native core: who waits for whom where cores are short."""

from __future__ import annotations

import os
from pathlib import Path

from unit.engine_cases import CPU, mlp, offloaded, run


def _niceness_by_name() -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for task in Path("/proc/self/task").iterdir():
        name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
        found.setdefault(name, set()).add(int(fields.split()[16]))
    return found


def test_update_threads_give_way_to_all_others(native):
    model = mlp()
    with offloaded(model, CPU) as optimizer:
        run(model, optimizer, steps=1)
        found = _niceness_by_name()
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert found.pop("forebay-update") == {min(usual + 10, 19)}
    assert found, "the launching thread and the lanes"
    assert set.union(*found.values()) == {usual}
