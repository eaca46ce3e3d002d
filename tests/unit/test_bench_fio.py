"""fio as a contestant, through a stand-in: what it is asked, and what it cannot do."""

from __future__ import annotations

import json

import pytest

from forebay.bench.nvme import NvmeSpec, bench_nvme

_MIB = 1 << 20
_SAYS = {
    "jobs": [
        {
            **{
                action: {"io_bytes": 8 * _MIB, "bw_bytes": 4 * _MIB, "runtime": 2000}
                for action in ("read", "write")
            },
            "usr_cpu": 3.0,
            "sys_cpu": 2.0,
        }
    ]
}


def _program(folder, *, refuses):
    """A program that notes its arguments, and refuses some."""
    path = folder / "fio"
    path.write_text(
        f"#!/bin/sh\n"
        f'echo "$*" >> {folder}/asked\n'
        f'case "$*" in *{refuses}*) echo "it cannot" >&2; exit 1;; esac\n'
        f"cat <<'END'\n{json.dumps(_SAYS)}\nEND\n"
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("refuses", "engines", "notes"),
    [
        ("nothing", ["io_uring", "libaio"], ()),
        ("=libaio", ["io_uring"], ("fio's libaio does not work here: it cannot.",)),
        ("/proc/", ["io_uring", "libaio"], ("fio's io_uring has a file of its own.",)),
        ("--direct", [], ("fio's io_uring does not work here: it cannot.",)),
    ],
    ids=["all", "no_libaio", "no_shared_file", "broken"],
)
def test_it_runs_what_works_and_says_what_does_not(refuses, engines, notes, tmp_path, monkeypatch):
    program = _program(tmp_path, refuses=refuses)
    monkeypatch.setattr("shutil.which", lambda name: str(program))
    found = bench_nvme(NvmeSpec(path=tmp_path, nbytes=8 * _MIB, rounds=1))
    others = [who for who, action in found.rounds if action == "read" and "forebay" not in who]
    assert others == ([f"fio {engine}" for engine in engines] or ["a loop"])
    for note in notes:
        assert note in found.table().notes
    asked = (tmp_path / "asked").read_text()
    assert "--bs=1048576 --iodepth=8 --size=8388608 --direct=1" in asked or not engines
    if engines and refuses != "/proc/":
        assert "--filename=/proc/" in asked
        moved = found.rounds[f"fio {engines[0]}", "write"][0]
        assert (moved.seconds, moved.cpu_seconds) == (2.0, pytest.approx(0.1))
