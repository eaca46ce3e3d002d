"""File queues of both cores: bytes, pieces, stripes, errors, short transfers, both backends."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

PAGE = 4096


class Pages:
    """Page-aligned memory with a numpy view."""

    def __init__(self, pages: int, seed: int | None = None) -> None:
        self._map = mmap.mmap(-1, max(1, pages) * PAGE)
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)[: pages * PAGE]
        self.address = np.frombuffer(self._map, dtype=np.uint8).ctypes.data
        if seed is not None:
            self.bytes[:] = np.random.default_rng(seed).integers(0, 256, pages * PAGE, np.uint8)


@pytest.fixture(params=["threads", "io_uring"])
def backend(core, request):
    """Makes a backend for a depth."""
    if request.param == "threads":
        return core.ThreadBackend
    try:
        core.UringBackend(1)
    except RuntimeError as error:
        pytest.skip(str(error))
    return core.UringBackend


def _files(core, folder, count=1, stripe=1 << 20):
    descriptors = [os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600) for _ in range(count)]
    files = core.FileSet(descriptors, [f"file {i}" for i in range(count)], stripe)
    for descriptor in descriptors:
        os.close(descriptor)
    return files


def _queue(core, backend, depth=4, block=4 * PAGE, *switches):
    return core.FileQueue(backend, depth, block, *switches)


def test_what_is_waited_for_passes_bulk(native, tmp_path):
    """Weights that a pass waits for come before state that was read ahead of them."""
    scripted = native.ScriptedBackend(native.ThreadBackend(2), 1, 4000)
    queue = _queue(native, scripted, 2, PAGE)
    files, memory = _files(native, tmp_path), Pages(64)
    queue.write(files, [(0, memory.address, 64 * PAGE)]).wait(30)
    bulk = [queue.read(files, [(0, memory.address, 64 * PAGE)], 1) for _ in range(3)]
    first = queue.read(files, [(0, memory.address, PAGE)], 0)
    assert first.wait(30)
    assert not bulk[0].done
    assert all(ticket.wait(30) for ticket in bulk)
    queue.close()


@pytest.mark.parametrize("pages", [0, 1, 4, 5, 33])
@pytest.mark.parametrize(("single", "overlap"), [(False, True), (True, False)])
def test_what_was_written_comes_back(core, backend, tmp_path, pages, single, overlap):
    queue = _queue(core, core.ScriptedBackend(backend(4), pages, 200), 4, 4 * PAGE, single, overlap)
    source, target = Pages(pages, pages), Pages(pages)
    files = _files(core, tmp_path, 3, 2 * PAGE)
    written = queue.write(files, [(PAGE, source.address, pages * PAGE)])
    read = queue.read(files, [(PAGE, target.address, pages * PAGE)], 0, [written])
    assert read.wait(30)
    assert (read.pieces, read.pieces_done) == (1, 1)
    assert np.array_equal(source.bytes, target.bytes)
    assert (queue.bytes_read, queue.bytes_written) == (pages * PAGE, pages * PAGE)
    queue.close()


def test_pieces_follow_pieces(core, backend, tmp_path):
    queue = _queue(core, core.ScriptedBackend(backend(4), 5, 300))
    files = _files(core, tmp_path)
    source, target = Pages(9, 1), Pages(9)
    spans = [(i * PAGE, i * PAGE, PAGE) for i in range(9)]
    written = queue.write(files, [(o, source.address + a, n) for o, a, n in spans])
    read = queue.read(files, [(o, target.address + a, n) for o, a, n in spans], 0, [], written)
    assert read.wait(30)
    assert np.array_equal(source.bytes, target.bytes)
    assert all(begin <= end for begin, end in read.times())
    queue.close()


def test_an_error_names_place_and_reason_and_reaches_what_follows(core, backend, tmp_path):
    queue = _queue(core, core.ScriptedBackend(backend(2), 0, 0, 1, 28), 2)
    files, source = _files(core, tmp_path), Pages(8, 1)
    written = queue.write(files, [(0, source.address, 8 * PAGE)])
    read = queue.read(files, [(0, source.address, PAGE)], 0, [written])
    text = r"writing 16384 bytes at byte 16384 of file 0 failed: No space left .*errno 28"
    for ticket in (written, read):
        with pytest.raises(RuntimeError, match=text):
            ticket.wait(30)
    assert queue.write(files, [(0, source.address, PAGE)]).wait(30)
    queue.close()


@pytest.mark.parametrize("short", [1, PAGE, PAGE + 700])
def test_a_short_transfer_goes_on(core, backend, tmp_path, short):
    for at in (0, 1, 4):
        queue = _queue(core, core.ScriptedBackend(backend(2), 0, 0, -1, 5, at, short), 2)
        files, source, target = _files(core, tmp_path), Pages(11, at), Pages(11)
        queue.write(files, [(0, source.address, 11 * PAGE)]).wait(30)
        queue.read(files, [(0, target.address, 11 * PAGE)]).wait(30)
        assert np.array_equal(source.bytes, target.bytes)
        queue.close()


def test_a_file_that_ends_early_is_an_error(core, backend, tmp_path):
    queue, target = _queue(core, backend(4)), Pages(2)
    with pytest.raises(RuntimeError, match="at byte 8192 of file 0 failed: the file ends there"):
        queue.read(_files(core, tmp_path), [(2 * PAGE, target.address, PAGE)]).wait(30)
    queue.close()


def test_a_full_disk_is_an_error(core, backend):
    """/dev/full answers every write with ENOSPC: a real error of the kernel, not a script."""
    descriptor = os.open("/dev/full", os.O_RDWR)
    files, source = core.FileSet([descriptor], ["/dev/full"], PAGE), Pages(1, 1)
    os.close(descriptor)
    queue = _queue(core, backend(4))
    with pytest.raises(RuntimeError, match=r"/dev/full failed: No space left on device"):
        queue.write(files, [(0, source.address, PAGE)]).wait(30)
    queue.close()


@pytest.mark.parametrize("span", [(1, 0, PAGE), (0, 8, PAGE), (0, 0, 512)])
def test_what_is_not_aligned_is_refused(core, backend, tmp_path, span):
    queue, target = _queue(core, backend(4)), Pages(1)
    offset, shift, nbytes = span
    with pytest.raises(ValueError, match="multiple of 4096"):
        queue.read(_files(core, tmp_path), [(offset, target.address + shift, nbytes)])
    queue.close()


def test_a_closed_queue_refuses(core, backend, tmp_path):
    queue, target = _queue(core, backend(4)), Pages(1)
    queue.close()
    queue.close()
    with pytest.raises(RuntimeError, match="closed"):
        queue.read(_files(core, tmp_path), [(0, target.address, PAGE)])
