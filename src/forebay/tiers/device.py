"""Device arenas: one flat allocation for one role of one part, reserved in the ledger first.

On `cuda` it is an allocation of torch's; on `cpu` a host mapping that counts as device memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay.tiers.host import HostArena
from forebay.tiers.ledger import Ledger, Role, Tier

if TYPE_CHECKING:
    from forebay.tiers.ledger import Reservation

__all__ = ["DeviceArena"]


class DeviceArena:
    """A flat tensor on a device.

    Args:
        elements: Its length.
        dtype: Its dtype.
        device: Where it lies.
        ledger: Where the bytes are counted.
        role: What they are in training.
        what: A short noun phrase for messages.

    Raises:
        BudgetError: The device budget does not hold the bytes.
    """

    def __init__(
        self,
        elements: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ledger: Ledger,
        role: Role,
        what: str,
    ) -> None:
        nbytes = elements * dtype.itemsize
        self._arena: HostArena | None = None
        self._reservation: Reservation | None = None
        if device.type == "cpu":
            self._arena = HostArena(nbytes, ledger=ledger, role=role, what=what, tier=Tier.DEVICE)
            self.flat = self._arena.tensor(dtype, offset_bytes=0, elements=elements)
        else:
            self._reservation = ledger.reserve(Tier.DEVICE, role, nbytes, what=what)
            self.flat = torch.zeros(elements, dtype=dtype, device=device)

    def close(self) -> None:
        """Let go of the memory; tensors that view it stay valid and keep it alive."""
        self.flat = torch.empty(0)
        if self._arena is not None:
            self._arena.close()
        if self._reservation is not None:
            self._reservation.release()
