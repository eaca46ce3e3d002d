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
