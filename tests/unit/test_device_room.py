"""Where staging lies in what torch's allocator has: the upper end of the largest hole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from forebay.engine import room as room_module
from forebay.engine.room import DeviceRoom, Hole
from forebay.tiers.ledger import Ledger, Role, Tier

MB = 1 << 20


class BestFit:
    """torch's rule: the smallest free block that is large enough, its lower end."""

    def __init__(self, *holes: tuple[int, int]) -> None:
        self.free = dict(holes)

    def empty(self, size: int, **_options: object) -> object:
        size = -(-size // 512) * 512
        room, address = min((room, at) for at, room in self.free.items() if room >= size)
        del self.free[address]
        if room > size:
            self.free[address + size] = room - size
        return _Block(self, address, size)

    def release(self, address: int, size: int) -> None:
        for at in sorted(self.free):
            if at + self.free[at] == address:
                address, size = at, size + self.free.pop(at)
            elif at == address + size:
                size += self.free.pop(at)
        self.free[address] = size


class _Block:
    def __init__(self, allocator: BestFit, address: int, size: int) -> None:
        self._allocator, self._address, self._size = allocator, address, size

    def data_ptr(self) -> int:
        return self._address

    def __del__(self) -> None:
        self._allocator.release(self._address, self._size)


@pytest.mark.parametrize("nbytes", [MB, 300 * MB, 300 * MB + 7, 700 * MB, 799 * MB, 800 * MB])
@pytest.mark.parametrize(
    "others", [(), ((0, 200 * MB),), ((0, 90 * MB), (100 * MB, 500 * MB), (2000 * MB, 700 * MB))]
)
def test_the_upper_end_of_the_hole_that_was_meant(monkeypatch, others, nbytes):
    hole = (1000 * MB, 800 * MB)
    allocator = BestFit(*others, hole)
    fake = SimpleNamespace(empty=allocator.empty, uint8=torch.uint8)
    monkeypatch.setattr(room_module, "torch", fake)
    room = DeviceRoom(torch.device("cpu"), ledger=Ledger())
    block = room.take(nbytes, Hole(address=hole[0], size=hole[1]))
    grains = -(-nbytes // 512) * 512
    if 800 * MB - nbytes >= 2 * MB:
        assert block.data_ptr() + grains == sum(hole)
        # what kept the rest is free again, in one piece
        assert allocator.free == {**dict(others), hole[0]: hole[1] - grains}
    del block
    assert allocator.free == dict((*others, hole))


@pytest.mark.parametrize(
    ("staged", "peak_in_loss", "room_after"),
    [
        (0, 900, 855 - 100),  # 95% of it, less what is allocated
        (0, 400, 380 - 100),  # no higher than before: the first window's mark stays
        (50, 900, 380 - 100),  # some of that peak was staged
    ],
)
def test_a_peak_between_two_looks_raises_the_mark(monkeypatch, staged, peak_in_loss, room_after):
    seen = {"max_memory_allocated": 400, "max_memory_reserved": 450, "memory_allocated": 100}
    cuda = SimpleNamespace(**{name: lambda _d, name=name: seen[name] for name in seen})
    monkeypatch.setattr(room_module, "torch", SimpleNamespace(cuda=cuda))
    ledger = Ledger()
    room = DeviceRoom(torch.device("cuda", 0), ledger=ledger)
    assert room.free_bytes() == 0, "the first window stages nothing"
    room.observe()
    with ledger.reserve(Tier.DEVICE, Role.STAGING, staged, what="a visit"):
        room.emptied()
    seen["max_memory_allocated"] = max(peak_in_loss, 400)
    assert room.free_bytes() == room_after
    seen["max_memory_allocated"] = 2000  # staging came back: its peaks say nothing
    assert room.free_bytes() == room_after


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_upper_end_on_a_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    room = DeviceRoom(device, ledger=Ledger())
    kept = [torch.empty(size * MB, dtype=torch.uint8, device=device) for size in (90, 4, 700, 4)]
    del kept[2], kept[0]
    reserved = torch.cuda.memory_reserved()
    hole = room.holes()[0]
    block = room.take(300 * MB + 5, hole)
    assert hole.address is not None
    assert hole.size - 512 < block.data_ptr() + 300 * MB + 5 - hole.address <= hole.size
    assert torch.cuda.memory_reserved() == reserved
