"""The memory of one part's working weights: flat on the device or on the host, or in files.

Where they live on the device for good, parameters are views of it. Elsewhere parameters are tensors
of a `WeightHome`, whose memory comes and goes, and this is what is brought there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay.engine.file_state import FileState
from forebay.engine.homes import WeightHome
from forebay.plan.placement import WeightPlace
from forebay.plan.records import WEIGHT, weight_form
from forebay.tiers.device import DeviceArena
from forebay.tiers.host import HostArena
from forebay.tiers.ledger import Role

if TYPE_CHECKING:
    from forebay.engine.state_memory import PartMemory
    from forebay.model.layout import PartLayout, Shard
    from forebay.plan.placement import Placement

__all__ = ["WeightMemory"]


class WeightMemory:
    """Where the weights of one part are.

    Args:
        layout: The part.
        placement: The model's placement.
        place: Where its weights live.
        in_master: The master's tensor, where the weights are (the high half of) it.
        memory: Device, ledger, files and page-locking policy.

    Attributes:
        files: The files that hold them, or None.
        on_device: Their memory on the device, if that is where they live.
        home: The parameters' memory on the device, where weights come and go.
    """

    def __init__(
        self,
        layout: PartLayout,
        *,
        placement: Placement,
        place: WeightPlace,
        in_master: torch.Tensor | None,
        memory: PartMemory,
    ) -> None:
        dtype = getattr(torch, layout.dtype)
        shard = placement.sharding.state(layout)
        what = f"weights of {layout.elements} parameters"
        self.files: FileState | None = None
        self.home: WeightHome | None = None
        self.on_device: DeviceArena | None = None
        self._arena: HostArena | None = None
        self._flat = torch.empty(0, dtype=dtype)
        if place is not WeightPlace.DEVICE:
            self.home = WeightHome(layout, dtype=dtype, accelerator=memory.accelerator)
        if place in {WeightPlace.DEVICE, WeightPlace.RANKS}:
            self.on_device = DeviceArena(
                layout.elements if place is WeightPlace.DEVICE else shard.elements,
                dtype=dtype,
                device=memory.device,
                ledger=memory.ledger,
                role=Role.LP_PARAMS,
                what=what,
            )
        elif place is WeightPlace.NVME:
            self.files = _files(layout, shard, placement=placement, memory=memory)
        elif in_master is not None:
            self._flat = in_master
        else:
            self._arena = memory.host_arena(
                shard.elements * dtype.itemsize, role=Role.LP_PARAMS, what=what
            )
            self._flat = self._arena.tensor(dtype, offset_bytes=0, elements=shard.elements)

    @property
    def flat(self) -> torch.Tensor:
        """All of them, or this rank's shard where no rank has all; empty where in files."""
        return self._flat if self.on_device is None else self.on_device.flat

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Elements: a view where they are in memory, a copy where they are in files."""
        if self.files is not None:
            return self.files.read(WEIGHT, begin, end)
        return self.flat[begin:end]

    def write(self, begin: int, values: torch.Tensor) -> None:
        """Write elements, given flat."""
        if self.files is not None:
            self.files.write(WEIGHT, begin, values)
        else:
            self.flat[begin : begin + values.numel()] = values.to(self.flat.device)

    def close(self) -> None:
        """Let go of the memory; it lives on while parameters view it."""
        for arena in (self._arena, self.on_device):
            if arena is not None:
                arena.close()
        if self.files is not None:
            self.files.close()
        self.on_device = None
        self._flat = torch.empty(0)


def _files(
    layout: PartLayout, shard: Shard, *, placement: Placement, memory: PartMemory
) -> FileState:
    assert memory.files is not None
    return FileState(
        shard.elements,
        names=[(slot.names[0], *shard.segment(slot)[:2]) for slot in layout.slots],
        piece_elements=placement.buffers.piece_elements,
        space=memory.files,
        form=weight_form(layout.dtype),
    )
