"""The device memory of a streamed part's weights: it comes and goes, the storages stay.

[Note: storage identity] Autograd saves views of weights, so the storage behind a parameter must be
the same from its first use in a pass to its last one in the following backward. Each parameter has
one for good; `fill` gives it memory and `empty` takes it away. What lies in it is the residency's
business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.dlpack import from_dlpack

from forebay.plan.home_bytes import home_bytes

if TYPE_CHECKING:
    from forebay.accelerators.base import Accelerator
    from forebay.model.layout import ParamSlot, PartLayout

__all__ = ["WeightHome", "own_tensor"]


class WeightHome:
    """One tensor for each parameter of a part, with or without memory.

    Args:
        layout: The part.
        dtype: Its working dtype.
        accelerator: Where; its private pool gives the memory.

    Attributes:
        nbytes: What all of them take together.
    """

    def __init__(self, layout: PartLayout, *, dtype: torch.dtype, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.nbytes = home_bytes(layout)
        self._tensors: dict[int, torch.Tensor] = {}
        for slot in layout.slots:
            tensor = torch.empty(slot.shape, dtype=dtype, device=accelerator.device)
            tensor.untyped_storage().resize_(0)
            self._tensors[slot.index] = tensor
        self._sized = [
            (tensor.untyped_storage(), tensor.numel() * tensor.element_size())
            for tensor in self._tensors.values()
        ]

    def tensor(self, slot: ParamSlot) -> torch.Tensor:
        """One parameter's tensor, always the same object; readable between `fill` and `empty`."""
        return self._tensors[slot.index]

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """All storages."""
        return [storage for storage, _ in self._sized]

    def fill(self) -> None:
        """Give every storage its memory; its content is undefined."""
        with self._accelerator.private_pool():
            for storage, nbytes in self._sized:
                storage.resize_(nbytes)

    def empty(self) -> None:
        """Take all memory away. Work that is enqueued on the compute stream may still read it."""
        for storage, _ in self._sized:
            storage.resize_(0)

    def close(self) -> None:
        """Let go of the tensors: their memory goes at once, unless somebody else views it.

        A tensor that was made of a weight (`p.detach()`, a view) must not lose what it shows.
        """
        self._tensors.clear()
        self._sized.clear()


def own_tensor(flat: torch.Tensor, slot: ParamSlot) -> torch.Tensor:
    """One parameter's weight over flat memory, with a storage of its own.

    See [Note: storages] in `engine.part`.
    """
    own = flat[slot.offset : slot.end].view(slot.shape)
    return from_dlpack(own) if slot.elements else own
