"""How much may be staged: what activations were seen to need, whoever used it meanwhile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from forebay.engine import room as room_module
from forebay.engine.room import DeviceRoom
from forebay.tiers.ledger import Ledger, Role, Tier


@pytest.mark.parametrize(
    ("staged", "peak_in_loss", "room_after"),
    [
        (0, 900, 855 - 100),  # 95% of it, less what is allocated
        (0, 400, 380 - 100),  # no higher than before: the first window's mark stays
        (50, 900, 380 - 100),  # some of that peak was staged
    ],
)
def test_a_peak_between_two_looks_raises_the_mark(monkeypatch, staged, peak_in_loss, room_after):
    seen = {"peak": 400, "current": 100}
    stats = {
        "allocated_bytes": {"all": seen},
        "reserved_bytes": {"all": {"current": 0, "peak": 450}},
    }
    cuda = SimpleNamespace(memory_stats_as_nested_dict=lambda _d: stats)
    monkeypatch.setattr(room_module, "torch", SimpleNamespace(cuda=cuda))
    ledger = Ledger()
    room = DeviceRoom(torch.device("cuda", 0), ledger=ledger)
    assert room.free_bytes() == 0, "the first window stages nothing"
    room.observe()
    with ledger.reserve(Tier.DEVICE, Role.STAGING, staged, what="a visit"):
        room.emptied()
    seen["peak"] = max(peak_in_loss, 400)
    assert room.free_bytes() == room_after
    seen["peak"] = 2000  # staging came back: its peaks say nothing
    assert room.free_bytes() == room_after


class _Allocator:
    """One segment of a caching allocator: the smallest free piece that fits, from its begin."""

    def __init__(self, nbytes: int) -> None:
        self.reserved = nbytes
        self.taken: dict[int, int] = {}
        self.peak = 0

    def _free(self):
        at = 0
        for begin, nbytes in [*sorted(self.taken.items()), (self.reserved, 0)]:
            if begin > at:
                yield at, begin - at
            at = begin + nbytes

    def take(self, nbytes: int) -> int:
        fitting = [(size, begin) for begin, size in self._free() if size >= nbytes]
        assert fitting, f"{nbytes} bytes would have to be asked for, or cached ones given back"
        begin = min(fitting)[1]
        self.taken[begin] = nbytes
        self.peak = max(self.peak, sum(self.taken.values()))
        return begin

    def stats(self):
        given = {"current": sum(self.taken.values()), "peak": self.peak}
        taken = {"current": self.reserved, "peak": self.reserved}
        return {"allocated_bytes": {"all": given}, "reserved_bytes": {"all": taken}}

    def snapshot(self):
        pieces = [(at, nbytes, "active_allocated") for at, nbytes in self.taken.items()]
        pieces += [(at, nbytes, "inactive") for at, nbytes in self._free()]
        blocks = [{"size": nbytes, "state": state} for _, nbytes, state in sorted(pieces)]
        return [{"device": 0, "stream": 7, "address": 0, "blocks": blocks}]


class _Block:
    def __init__(self, allocator: _Allocator, nbytes: int) -> None:
        self.allocator, self.at = allocator, allocator.take(nbytes)

    def data_ptr(self) -> int:
        return self.at

    def __del__(self) -> None:
        del self.allocator.taken[self.at]


def test_staging_after_a_short_step_leaves_a_long_one_its_place(monkeypatch):
    """What a long forward keeps goes below what a short step staged; its loss is one piece."""
    page = 2 << 20
    kept, loss, state, short = 200 * page, 1000 * page, 650 * page, 20 * page
    allocator = _Allocator(kept + loss)
    cuda = SimpleNamespace(
        current_stream=lambda _d: SimpleNamespace(cuda_stream=7),
        memory_snapshot=allocator.snapshot,
        memory_stats_as_nested_dict=lambda _d: allocator.stats(),
    )
    fake = SimpleNamespace(cuda=cuda, uint8=None, empty=lambda n, **_: _Block(allocator, n))
    monkeypatch.setattr(room_module, "torch", fake)
    room = DeviceRoom(torch.device("cuda", 0), ledger=Ledger())

    def step(keeps: int, takes: int, staged: list[_Block]) -> list[_Block]:
        """Forward around what is staged, the loss without, then room for the next visit."""
        activations = [_Block(allocator, 10 * page) for _ in range(keeps // (10 * page))]
        staged.clear()
        _Block(allocator, takes)  # gone at once
        room.observe()
        visit = room.take(state, hole=room.holes()[0])
        activations.clear()
        return [visit]

    staged = []
    for _ in range(3):
        staged = step(kept, loss, staged)
        staged = step(short, loss // 10, staged)
    assert allocator.peak == kept + loss
