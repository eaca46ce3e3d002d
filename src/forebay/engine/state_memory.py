"""Where a part's memory comes from, and the memory of its master and moments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from forebay.plan.placement import MasterLayout, UpdatePlace
from forebay.tiers.device import DeviceArena
from forebay.tiers.host import HostArena
from forebay.tiers.ledger import Role

if TYPE_CHECKING:
    from forebay.accelerators.base import Accelerator
    from forebay.engine.file_space import FileSpace
    from forebay.tiers.ledger import Ledger
    from forebay.tiers.page_locking import PageLocking

__all__ = ["PartMemory", "StateMemory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartMemory:
    """Where a part's memory comes from; `files` where state may lie in files."""

    accelerator: Accelerator
    ledger: Ledger
    page_locking: PageLocking
    files: FileSpace | None = None

    @property
    def device(self) -> torch.device:
        """Where weights and activations are computed with."""
        return self.accelerator.device

    def host_arena(self, nbytes: int, *, role: Role, what: str) -> HostArena:
        """An arena that the link copies from or to."""
        return HostArena(
            nbytes, ledger=self.ledger, role=role, what=what, page_locking=self.page_locking
        )


class StateMemory:
    """Master and moments of a part: flat tensors on the host or on the device.

    `high` is the bf16 half in split layout, the fp32 master otherwise; None where the working
    weight is its own master and lies on the device.
    """

    def __init__(
        self, elements: int, master: MasterLayout, *, update: UpdatePlace, memory: PartMemory
    ) -> None:
        self.arenas: list[HostArena | DeviceArena] = []
        self._placed: dict[str, DeviceArena] = {}
        n, what = elements, f"{elements} parameters"
        self.high: torch.Tensor | None = None
        self.low: torch.Tensor | None = None
        self.exp_avg: torch.Tensor
        self.exp_avg_sq: torch.Tensor
        if update is UpdatePlace.NVME:
            self.high = self.exp_avg = self.exp_avg_sq = torch.empty(0)
            return
        if update is not UpdatePlace.DEVICE:
            visits = update is UpdatePlace.STREAMED
            # Only what crosses the link is locked, which takes 0.7 s per GiB: all of it on visits,
            # else the half that is the new weight (a whole master's is written over the gradient).
            crossing = {
                MasterLayout.WEIGHT: 4 * n,
                MasterLayout.SPLIT: 4 * n if visits else 2 * n,
                MasterLayout.WHOLE: 4 * n if visits else 0,
            }
            hp = self._host(4 * n, Role.HP_PARAMS, f"masters of {what}", memory)
            if master is MasterLayout.SPLIT:
                self.high = hp.tensor(torch.bfloat16, offset_bytes=0, elements=n)
                self.low = hp.tensor(torch.int16, offset_bytes=2 * n, elements=n)
            else:
                self.high = hp.tensor(torch.float32, offset_bytes=0, elements=n)
            moments = self._host(8 * n, Role.OPTIM_STATES, f"moments of {what}", memory)
            hp.lock(memory.page_locking, nbytes=crossing[master])
            moments.lock(memory.page_locking, nbytes=8 * n if visits else 0)
            self.exp_avg = moments.tensor(torch.float32, offset_bytes=0, elements=n)
            self.exp_avg_sq = moments.tensor(torch.float32, offset_bytes=4 * n, elements=n)
            return
        masters, kept = (Role.HP_PARAMS, f"masters of {what}"), Role.OPTIM_STATES
        self._placed = placed = {}
        if master is MasterLayout.SPLIT:
            placed["low"] = self._device(n, torch.int16, *masters, memory)
        elif master is MasterLayout.WHOLE:
            placed["high"] = self._device(n, torch.float32, *masters, memory)
        for name, noun in (("exp_avg", "first moments"), ("exp_avg_sq", "second moments")):
            placed[name] = self._device(n, torch.float32, kept, f"{noun} of {what}", memory)
        self.rebind()

    def forget(self) -> None:
        """The memory is closed: drop what views it."""
        self._placed.clear()
        self.high = self.low = None
        self.exp_avg = self.exp_avg_sq = torch.empty(0)

    def rebind(self) -> None:
        """See the memory that device arenas have now."""
        for name, arena in self._placed.items():
            setattr(self, name, arena.flat)

    def _host(self, nbytes: int, role: Role, what: str, memory: PartMemory) -> HostArena:
        arena = HostArena(nbytes, ledger=memory.ledger, role=role, what=what)
        self.arenas.append(arena)
        return arena

    def _device(
        self, elements: int, dtype: torch.dtype, role: Role, what: str, memory: PartMemory
    ) -> DeviceArena:
        arena = DeviceArena(
            elements,
            dtype=dtype,
            device=memory.device,
            ledger=memory.ledger,
            role=role,
            what=what,
        )
        self.arenas.append(arena)
        return arena
