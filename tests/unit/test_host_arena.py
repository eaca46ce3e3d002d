"""Host arenas: exact size, counted, safe to let go of."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import BudgetError, EngineClosedError
from forebay.tiers.host import HostArena, resident_bytes
from forebay.tiers.ledger import Ledger, Role, Tier

PAGE = mmap.PAGESIZE
SIZES = [0, 1, 199, PAGE - 1, PAGE, PAGE + 1, 5_000_001]
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def arena_of(nbytes, *, ledger=None, **options):
    return HostArena(
        nbytes,
        ledger=ledger or Ledger(),
        role=Role.OPTIM_STATES,
        what="moments",
        **options,
    )


@pytest.mark.parametrize("nbytes", SIZES)
def test_size_is_exact_to_the_page_and_reserved(nbytes):
    ledger = Ledger()
    with arena_of(nbytes, ledger=ledger) as arena:
        assert arena.nbytes == -(-nbytes // PAGE) * PAGE
        assert ledger.bytes(Tier.HOST, Role.OPTIM_STATES) == arena.nbytes
        assert arena.address % PAGE == 0
        view = arena.tensor(torch.uint8, offset_bytes=0, elements=arena.nbytes)
        assert not view.any()
        del view
    assert ledger.bytes(Tier.HOST) == 0


@linux
@given(st.lists(st.integers(1, 3_000_000), min_size=1, max_size=8))
@settings(max_examples=20, deadline=None)
def test_resident_bytes_equal_what_was_reserved(sizes):
    """No rounding to powers of two: touched arenas occupy what the ledger says, within 2%."""
    ledger = Ledger()
    arenas = [arena_of(size, ledger=ledger) for size in sizes]
    for arena in arenas:
        arena.tensor(torch.uint8, offset_bytes=0, elements=arena.nbytes).fill_(1)
    resident = [arena.resident_bytes() for arena in arenas]
    assert resident == [arena.nbytes for arena in arenas]
    assert sum(resident) == ledger.bytes(Tier.HOST)
    assert sum(resident) <= 1.02 * sum(sizes) + len(sizes) * PAGE
    for arena in arenas:
        arena.close()


@linux
def test_untouched_memory_is_not_resident():
    with arena_of(64 << 20) as arena:
        assert arena.resident_bytes() == 0


def test_resident_bytes_reads_only_mappings_inside(tmp_path):
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "1000-3000 rw-p 00000000 00:00 0\nSize:  8 kB\nRss:   8 kB\nVmFlags: rd wr\n"
        "3000-5000 rw-p 00000000 00:00 0 [anon: x]\nRss:   4 kB\nPss:  4 kB\n"
        "5000-9000 rw-p 00000000 00:00 0\nRss:  16 kB\n"
    )
    assert resident_bytes(0x1000, nbytes=0x4000, smaps=smaps) == 12 * 1024


def test_views_alias_the_arena():
    with arena_of(4096) as arena:
        whole = arena.tensor(torch.uint8, offset_bytes=0, elements=4096)
        part = arena.tensor(torch.bfloat16, offset_bytes=512, elements=3)
        part.copy_(torch.tensor([1.0, -2.0, 3.0]))
        assert part.data_ptr() == arena.address + 512
        assert whole[512:518].view(torch.bfloat16).tolist() == [1.0, -2.0, 3.0]
        assert arena.tensor(torch.float32, offset_bytes=0, elements=0).shape == (0,)
        del whole, part


@pytest.mark.parametrize(
    ("offset", "elements"), [(-4, 1), (0, -1), (PAGE, 1), (PAGE - 4, 2), (2, 1), (1 << 70, 0)]
)
def test_views_stay_inside_and_aligned(offset, elements):
    with arena_of(PAGE) as arena, pytest.raises(ValueError, match=r"moments|aligned"):
        arena.tensor(torch.float32, offset_bytes=offset, elements=elements)


def test_over_budget_maps_nothing(monkeypatch):
    ledger = Ledger({Tier.HOST: PAGE})
    monkeypatch.setattr(mmap, "mmap", lambda *_, **__: pytest.fail("mapped over budget"))
    with pytest.raises(BudgetError, match="budget is"):
        arena_of(PAGE + 1, ledger=ledger)
    assert ledger.bytes(Tier.HOST) == 0


def test_a_refused_mapping_gives_its_reservation_back():
    ledger = Ledger()
    with pytest.raises(BudgetError, match="cannot map"):
        arena_of(1 << 60, ledger=ledger)
    assert ledger.bytes(Tier.HOST) == 0


def test_views_outlive_close_and_hold_the_reservation():
    ledger = Ledger()
    arena = arena_of(PAGE, ledger=ledger)
    view = arena.tensor(torch.float32, offset_bytes=0, elements=8).fill_(3.0)
    arena.close()
    arena.close()
    assert arena.closed
    assert view.tolist() == [3.0] * 8
    assert ledger.bytes(Tier.HOST) == PAGE
    with pytest.raises(EngineClosedError, match="given back"):
        arena.tensor(torch.float32, offset_bytes=0, elements=8)
    del view
    gc.collect()
    assert ledger.bytes(Tier.HOST) == 0


@linux
def test_nothing_comes_from_shared_memory():
    """Containers often give /dev/shm 64 MB; arenas are private mappings of no file."""
    with arena_of(1 << 20) as arena:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        (line,) = [line for line in maps if line.startswith(f"{arena.address:x}-")]
        fields = line.split()
        assert fields[1] == "rw-p"
        assert fields[4] == "0"


@linux
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE])
def test_forked_workers_do_not_share_host_state(tier):
    """Else a data loader's workers double it; the cpu device's weights stay readable there."""
    arena = arena_of(PAGE, tier=tier)
    view = arena.tensor(torch.uint8, offset_bytes=0, elements=PAGE).fill_(1)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os._exit(int(view[0]) - 1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) == (tier is Tier.HOST)
    assert int(view[0]) == 1
