"""The system's limits on open files, mappings and threads: each is named, with its numbers."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import threading

import pytest

from checkpoint_cases import Layout, engine_of, run
from forebay import native
from forebay.errors import BudgetError, CheckpointError, StorageError, TransferError
from forebay.hardware.reason import reason_of
from forebay.tiers.host import HostArena
from forebay.tiers.ledger import Ledger, Role
from forebay.tiers.nvme import NvmeStore
from forebay.tiers.page_locking import PageLocking

LIMIT = 128


@contextlib.contextmanager
def descriptors_left(count):
    """A limit on open files, and so many of them left."""
    before, held = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(count):
            os.close(held.pop())
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _refused_until(enough, call, *, error):
    for left in range(enough):
        with descriptors_left(left), pytest.raises(error, match=f"all {LIMIT} that") as caught:
            call()
        assert "ulimit -n" in caught.value.hint
    with descriptors_left(enough):
        return call()


def test_swap_files_without_a_descriptor_left(tmp_path):
    core = native.core()

    def _open():
        return NvmeStore([tmp_path], nbytes=4096, stripe_bytes=4096, core=core)

    _refused_until(2, _open, error=StorageError).close()


def test_checkpoints_without_a_descriptor_left(tmp_path):
    with engine_of(Layout()) as engine:
        run(engine, 0, 1)
        engine.save_checkpoint(tmp_path, "one")
        _refused_until(2, lambda: engine.save_checkpoint(tmp_path, "two"), error=CheckpointError)
        _refused_until(3, lambda: engine.load_checkpoint(tmp_path, "one"), error=CheckpointError)
        _refused_until(3, lambda: engine.load_checkpoint(tmp_path), error=CheckpointError)


def test_too_many_mappings_are_told_from_too_little_memory(tmp_path, monkeypatch):
    refused = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    (tmp_path / "sys/vm").mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "sys/vm/max_map_count").write_text("100\n")
    (tmp_path / "self/maps").write_text("7f00-7f01 r--p\n" * 50)
    assert reason_of(refused, hint="free some", proc=tmp_path) == (refused.strerror, "free some")
    (tmp_path / "self/maps").write_text("7f00-7f01 r--p\n" * 99)
    reason, hint = reason_of(refused, hint="free some", proc=tmp_path)
    assert "has 99 mappings of memory, and vm.max_map_count is 100" in reason
    assert "sysctl -w vm.max_map_count" in hint

    def _refuse(*_args, **_more):
        raise refused

    monkeypatch.setattr(mmap, "mmap", _refuse)
    monkeypatch.setattr("forebay.tiers.host.reason_of", lambda *_, hint: ("too many", hint))
    ledger = Ledger()
    with pytest.raises(BudgetError, match="for an example: too many"):
        HostArena(100, ledger=ledger, role=Role.STAGING, what="an example")


def test_a_thread_of_python_that_cannot_start_is_named(monkeypatch):
    def _refuse(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", _refuse)
    locking = PageLocking(object())
    with pytest.raises(TransferError, match="page-locking needs some: can't start new thread"):
        locking.lock(4096, nbytes=4096, what="an example", keep=None)
    assert locking.wait(1.0)
