"""Host memory over several nodes: asked for where it helps, harmless where it is refused."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from forebay.tiers import host, numa
from forebay.tiers.host import HostArena
from forebay.tiers.ledger import Ledger, Role, Tier


class Kernel:
    """Remembers what it was asked, and answers as told."""

    def __init__(self, answer=0):
        self.answer = answer
        self.asked = []

    def syscall(self, *arguments):
        number, address, nbytes, mode, mask, bits, flags = arguments
        self.asked.append((number.value, address.value, nbytes.value, mode.value, list(mask)))
        assert bits.value == 64 * len(mask) + 1
        assert flags.value == 0
        return self.answer


@pytest.fixture
def on_x86(monkeypatch):
    monkeypatch.setattr(numa.platform, "machine", lambda: "x86_64")


@pytest.mark.parametrize(("nodes", "mask"), [((0, 1), [3]), ((1, 3), [10]), ((0, 64), [1, 1])])
def test_pages_are_spread_over_the_nodes(nodes, mask, on_x86):
    kernel = Kernel()
    assert numa.interleave(4096, nbytes=8192, nodes=nodes, libc=kernel)
    assert kernel.asked == [(237, 4096, 8192, 3, mask)]


def test_one_node_asks_for_nothing(on_x86):
    kernel = Kernel()
    assert not numa.interleave(4096, nbytes=8192, nodes=(0,), libc=kernel)
    assert not numa.interleave(4096, nbytes=0, nodes=(0, 1), libc=kernel)
    assert not kernel.asked


def test_a_refusal_is_no_error(on_x86, monkeypatch):
    assert not numa.interleave(4096, nbytes=8192, nodes=(0, 1), libc=Kernel(answer=-1))
    monkeypatch.setattr(numa.platform, "machine", lambda: "vax")
    assert not numa.interleave(4096, nbytes=8192, nodes=(0, 1), libc=Kernel())


def test_this_system_takes_or_leaves_it():
    """Nodes that may not exist: memory works all the same."""
    page = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    for nodes in ((0, 1), (0, 200)):
        numa.interleave(address, nbytes=1 << 20, nodes=nodes)
    page.write(b"x" * (1 << 20))
    assert numa.nodes_at_work()


def test_arenas_ask_before_their_pages_are_touched(monkeypatch):
    asked = []

    def _interleave(address, *, nbytes, nodes):
        asked.append((address, nbytes, nodes))
        return False

    monkeypatch.setattr(host, "interleave", _interleave)
    monkeypatch.setattr(host, "nodes_at_work", lambda: (0, 1))
    with HostArena(5000, ledger=Ledger(), role=Role.STAGING, what="a test") as arena:
        assert asked == [(arena.address, arena.nbytes, (0, 1))]
        assert arena.resident_bytes() == 0
        arena.tensor(torch.uint8, offset_bytes=0, elements=5000).fill_(1)
    with HostArena(5000, ledger=Ledger(), role=Role.STAGING, what="x", tier=Tier.DEVICE):
        assert len(asked) == 1  # the cpu device's weights are the main thread's
