"""The seam to the file system: the same bytes, directly or through the page cache."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from forebay.checkpoint.disk import FILE_ALIGNMENT, RealDisk

_PAGE = FILE_ALIGNMENT
_LARGE = 64 << 10


def _noise(nbytes: int, *, shift: int = 0) -> memoryview:
    """Bytes that lie `shift` behind the beginning of a page."""
    block = memoryview(mmap.mmap(-1, nbytes + shift + 1))[shift : shift + nbytes]
    block[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8).tobytes()
    return block


@pytest.fixture
def written(monkeypatch):
    """What was written: (direct, position, bytes) of each call."""
    calls = []
    real = os.pwrite

    def pwrite(file, data, at):
        direct = bool(_flags(file) & os.O_DIRECT)
        count = real(file, data, at)
        calls.append((direct, at, count))
        return count

    monkeypatch.setattr(os, "pwrite", pwrite)
    return calls


def _flags(file: int) -> int:
    return fcntl.fcntl(file, fcntl.F_GETFL)


def _write(path, parts, *, nbytes):
    disk = RealDisk()
    file = disk.create(path, nbytes=nbytes)
    for at, data in parts:
        disk.write(file, data, at=at)
    disk.sync(file)
    disk.close(file)
    assert not disk._direct


def _can_write_directly(folder) -> bool:
    try:
        file = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    except OSError:
        return False
    os.close(file)
    return True


@pytest.mark.parametrize("tail", [0, 1, 511, 512, _PAGE - 1])
@pytest.mark.parametrize("shift", [0, 512, 8])
@pytest.mark.parametrize("begin", [_PAGE, _PAGE + 8])
def test_any_bytes_anywhere(tmp_path, written, tail, shift, begin):
    """Whole pages from aligned memory go directly, all else through the cache, nothing is lost."""
    head, body = _noise(begin), _noise(_LARGE + tail, shift=shift)
    rest = _noise(100)
    end = begin + len(body)
    _write(tmp_path / "file", [(end, rest), (0, head), (begin, body)], nbytes=end + len(rest))
    assert (tmp_path / "file").read_bytes() == bytes(head) + bytes(body) + bytes(rest)
    directly = [call for call in written if call[0]]
    if _can_write_directly(tmp_path) and shift % 512 == 0 and begin % _PAGE == 0:
        assert directly == [(True, begin, _LARGE)]
    else:
        assert not directly


def test_a_file_system_that_refuses_direct_writes(tmp_path, monkeypatch):
    real = os.pwrite
    refused = []

    def pwrite(file, data, at):
        if _flags(file) & os.O_DIRECT:
            refused.append(at)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(file, data, at)

    body = _noise(3 * _LARGE)
    monkeypatch.setattr(os, "pwrite", pwrite)
    _write(tmp_path / "one", [(0, body)], nbytes=len(body))
    assert (tmp_path / "one").read_bytes() == bytes(body)
    assert refused == ([0] if _can_write_directly(tmp_path) else [])


def test_a_file_system_that_opens_nothing_directly(tmp_path, monkeypatch, written):
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    body = _noise(3 * _LARGE)
    monkeypatch.setattr(os, "open", refuse)
    _write(tmp_path / "one", [(0, body)], nbytes=len(body))
    assert (tmp_path / "one").read_bytes() == bytes(body)
    assert not any(direct for direct, _, _ in written)


def test_short_direct_writes_are_gone_on_with(tmp_path, monkeypatch):
    """Also where the disk stops in the middle of a page."""
    real = os.pwrite
    body = _noise(5 * _LARGE)
    sizes = iter([_PAGE, 3 * _PAGE, _PAGE + 512])

    def pwrite(file, data, at):
        if _flags(file) & os.O_DIRECT:
            data = data[: next(sizes)]
        return real(file, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    _write(tmp_path / "file", [(0, body)], nbytes=len(body))
    assert (tmp_path / "file").read_bytes() == bytes(body)


def test_room_is_taken_at_once(tmp_path):
    disk = RealDisk()
    file = disk.create(tmp_path / "file", nbytes=1 << 20)
    status = os.fstat(file)
    disk.close(file)
    assert status.st_size in {0, 1 << 20}
    if status.st_size:
        assert status.st_blocks * 512 >= 1 << 20


def _num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_file_that_cannot_be_laid_out_is_closed(tmp_path, monkeypatch):
    def refuse(file, nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("forebay.checkpoint.disk._allocate", refuse)
    before = _num_open()
    with pytest.raises(OSError, match="No space left"):
        RealDisk().create(tmp_path / "file", nbytes=1 << 20)
    assert _num_open() == before
