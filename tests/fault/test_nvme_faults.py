"""Drives that are full, broken, lying or gone: one clear OSError, in seconds, and no file left."""

from __future__ import annotations

import errno
import gc
import os
import re
import shutil
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from forebay import EngineClosedError, ForebayError, StorageError, TransferError
from forebay.engine import EngineOptions, offload_with
from forebay.engine.file_space import NvmeOptions
from forebay.links.fake import FileFaultScript
from forebay.links.host_nvme import FileAccess, FileBackendKind
from forebay.native import core
from unit.engine_cases import loss_of, same, weights

pytestmark = pytest.mark.timeout(60)

BLOCK = 64 * 1024


def model(seed: int = 0) -> nn.Sequential:
    """Two units of two records each."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 20_000), nn.Tanh(), nn.Linear(20_000, 5))


def options(folder: Path, **access) -> EngineOptions:
    """Small pieces and few buffers, so that every step reads and writes."""
    nvme = NvmeOptions(
        paths=(folder,), buffer_count=2, buffer_elements=BLOCK, access=FileAccess(**access)
    )
    return EngineOptions(device="cpu", threads=2, nvme=nvme)


def take_over(trained: nn.Module, chosen: EngineOptions):
    """The optimizer of a model with state in files."""
    source = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    return offload_with(trained, source, options=chosen)[1]


def step(trained: nn.Module, optimizer, number: int) -> None:
    """One step on data that depends on its number."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
    loss_of(trained, x).backward()
    optimizer.step()
    optimizer.zero_grad()


def state_files(folder: Path) -> list[Path]:
    """Descriptors of files without a name in a folder that this process holds."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith(str(folder)) and target.endswith("(deleted)"):
            found.append(link)
    return found


@pytest.fixture
def folder(tmp_path):
    """A folder that is empty before, during and after."""
    place = tmp_path / "state"
    place.mkdir()
    yield place
    if place.exists():
        assert list(place.iterdir()) == []


# Making the state takes some blocks, a step some 20 more.
@pytest.mark.parametrize("backend", [FileBackendKind.BEST, FileBackendKind.THREADS])
@pytest.mark.parametrize("fail_at", [0, 5, 50, 60, 75, 90])
@pytest.mark.parametrize("number", [5, 28], ids=["EIO", "ENOSPC"])
def test_a_failing_block_is_one_error_then_closed(folder, backend, fail_at, number):
    script = FileFaultScript(seed=fail_at, max_delay_us=100, fail_at=fail_at, fail_errno=number)
    chosen = options(folder, backend=backend, fault=script, block_bytes=BLOCK)
    trained, optimizer = model(), None
    with pytest.raises(TransferError, match=rf"(reading|writing) \d+ bytes .*errno {number}"):
        optimizer = take_over(trained, chosen)
        for index in range(20):
            step(trained, optimizer, index)
    if optimizer is None:  # failed before the first step
        assert fail_at < 40
        return
    with pytest.raises(EngineClosedError, match="last checkpoint"):
        step(trained, optimizer, 0)
    with pytest.raises(EngineClosedError):
        optimizer.state_dict()
    with pytest.raises(EngineClosedError):
        trained.state_dict()
    optimizer.close()
    assert all(value.isnan().all() for value in trained.state_dict().values())


def test_a_failed_write_that_nobody_reads_is_told_by_the_barrier(folder):
    """The last write of a run: no later step would meet it."""
    chosen = options(folder)
    probe = take_over(model(), chosen)
    step(model_of := probe.engine.module, probe, 0)
    probe.synchronize()
    blocks = probe.engine.lanes.files.link.blocks
    probe.close()
    del model_of
    script = FileFaultScript(fail_at=blocks - 1)
    trained = model()
    optimizer = take_over(trained, options(folder, fault=script))
    with pytest.raises(TransferError, match="writing"):
        step(trained, optimizer, 0)
        optimizer.synchronize()
    optimizer.close()


def test_short_transfers_change_nothing(folder):
    expected = model()
    plain = take_over(expected, options(folder))
    trained = model()
    script = FileFaultScript(seed=1, short_at=47, short_bytes=8192)
    optimizer = take_over(trained, options(folder, fault=script, block_bytes=BLOCK))
    for index in range(4):
        step(expected, plain, index)
        step(trained, optimizer, index)
    assert same(weights(expected), weights(trained))
    plain.close()
    optimizer.close()


def flip(folder: Path, offset: int) -> None:
    """Turn one bit of the state's file over, where another process could."""
    (file,) = state_files(folder)
    descriptor = os.open(file, os.O_RDWR)
    try:
        byte = os.pread(descriptor, 1, offset)
        os.pwrite(descriptor, bytes([byte[0] ^ 0x01]), offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(("role", "offset"), [("master", 3), ("exp_avg", 1), ("exp_avg_sq", 2)])
@pytest.mark.parametrize("reader", ["step", "state_dict"])
def test_a_flipped_byte_is_found_before_it_is_used_and_named(folder, role, offset, reader):
    trained = model()
    optimizer = take_over(trained, options(folder))
    for index in range(3):
        step(trained, optimizer, index)
    optimizer.synchronize()
    # The first record's roles follow each other; its elements are those of the first weight.
    place = ["master", "exp_avg", "exp_avg_sq"].index(role) * 4 * BLOCK
    flip(folder, place + 4 * 1000 + offset)
    with pytest.raises(TransferError, match=rf"\b{role} of 0\.weight is not what was written"):
        if reader == "state_dict":
            if role == "master":
                optimizer.engine.units[0].parts[0].master_copy(
                    optimizer.engine.collector.records[0].slot
                )
            optimizer.state_dict()
        for index in range(2):
            step(trained, optimizer, index)
        optimizer.synchronize()
    optimizer.close()


def test_a_deleted_folder_does_not_matter_once_training_began(folder):
    trained, expected = model(), model()
    optimizer = take_over(trained, options(folder))
    plain = take_over(expected, EngineOptions(device="cpu"))
    step(trained, optimizer, 0)
    step(expected, plain, 0)
    shutil.rmtree(folder)
    for index in range(1, 4):
        step(trained, optimizer, index)
        step(expected, plain, index)
    assert same(weights(expected), weights(trained))
    optimizer.close()
    plain.close()
    with pytest.raises(StorageError, match="does not exist"):
        take_over(model(), options(folder))


def test_a_file_in_place_of_the_folder_is_refused(folder):
    file = folder.parent / "file"
    file.write_text("x")
    with pytest.raises(OSError, match="is no folder"):
        take_over(model(), options(file))


def test_more_than_the_disk_has_is_refused_with_both_numbers(folder, monkeypatch):
    """The check before anything is reserved; a really full disk is in test_nvme_process.py."""
    real = os.fstatvfs

    def almost_full(descriptor):
        seen = real(descriptor)
        return os.statvfs_result((*seen[:4], 3, *seen[5:]))

    monkeypatch.setattr(os, "fstatvfs", almost_full)
    with pytest.raises(StorageError, match=r"state takes 2\.\d MiB in .*, which has .* left"):
        take_over(model(), options(folder))


def test_two_engines_on_one_path_never_meet(folder):
    pairs = []
    for seed in (0, 1):
        trained, expected = model(seed), model(seed)
        pairs.append(
            (
                trained,
                take_over(trained, options(folder)),
                expected,
                take_over(expected, EngineOptions(device="cpu")),
            )
        )
    for index in range(4):
        for trained, optimizer, expected, plain in pairs:
            step(trained, optimizer, index)
            step(expected, plain, index)
    for trained, optimizer, expected, plain in pairs:
        assert same(weights(expected), weights(trained))
        optimizer.close()
        plain.close()


def test_a_thread_that_reads_state_while_steps_run_blames_no_drive(folder):
    """It saw a piece before an update and its checksum after, and named the drive for it."""
    trained, stop, errors = model(), threading.Event(), []
    script = FileFaultScript(seed=1, max_delay_us=1000)
    optimizer = take_over(trained, options(folder, fault=script))
    state = optimizer.engine.units[0].parts[0].files
    assert state is not None

    def read() -> None:
        while not stop.is_set() and not errors:
            try:
                state.read("exp_avg", 0, BLOCK)
            except TransferError as error:
                errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for index in range(10):
            step(trained, optimizer, index)
    finally:
        stop.set()
        reader.join()
    assert errors == []
    optimizer.close()


@pytest.mark.parametrize("native", ["Pool", "Link", "FileQueue"])
def test_a_limit_on_threads_is_named(native, folder, monkeypatch):
    """The system's words alone, "Resource temporarily unavailable", help nobody."""

    def refuse(*_args, **_more):
        raise RuntimeError(os.strerror(errno.EAGAIN))

    monkeypatch.setattr(core(), native, refuse)
    with pytest.raises(TransferError, match="the system starts no more threads") as caught:
        take_over(model(), options(folder))
    assert caught.value.errno == errno.EAGAIN
    assert "ulimit -u" in str(caught.value.hint)
    del caught
    gc.collect()
    assert state_files(folder) == []


def test_files_have_no_name_and_mode_0600_and_go_when_closed(folder):
    optimizer = take_over(model(), options(folder))
    assert list(folder.iterdir()) == []
    (file,) = state_files(folder)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.stat().st_blocks * 512 >= 2 * 12 * 100_000  # reserved, not sparse
    optimizer.close()
    assert state_files(folder) == []


def test_a_failed_start_leaves_nothing_open(folder):
    script = FileFaultScript(fail_at=3)
    with pytest.raises(ForebayError):
        take_over(model(), options(folder, fault=script))
    gc.collect()
    assert state_files(folder) == []


def test_striped_paths_share_the_bytes(tmp_path):
    folders = tuple(tmp_path / name for name in "abc")
    for one in folders:
        one.mkdir()
    chosen = options(folders[0], block_bytes=BLOCK)
    chosen = replace(chosen, nvme=replace(chosen.nvme, paths=folders))
    optimizer = take_over(model(), chosen)
    sizes = [file.stat().st_size for one in folders for file in state_files(one)]
    assert len(sizes) == 3
    assert max(sizes) - min(sizes) <= BLOCK
    optimizer.close()


def test_the_message_says_where(folder):
    script = FileFaultScript(fail_at=0)
    with pytest.raises(TransferError) as caught:
        take_over(model(), options(folder, fault=script))
    assert re.search(rf"the state file in {folder}", str(caught.value))
