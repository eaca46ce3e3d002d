"""Device arenas: one flat allocation for one role of one part, reserved in the ledger first.

On `cuda` it is an allocation of torch's; on `cpu` a host mapping that counts as device memory. Its
memory may go and come back; what was in it meanwhile is the caller's business.
"""

from __future__ import annotations

import weakref

import torch

from forebay.tiers.host import HostArena
from forebay.tiers.ledger import Ledger, Role, Tier

__all__ = ["DeviceArena"]


class DeviceArena:
    """A flat tensor on a device, zero when fresh.

    Args:
        elements: Its length.
        dtype: Its dtype.
        device: Where it lies.
        ledger: Where the bytes are counted.
        role: What they are in training.
        what: A short noun phrase for messages.

    Attributes:
        flat: The tensor; empty while the memory is away.
        role: As above.

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
        self._elements = elements
        self._dtype = dtype
        self._device = device
        self._ledger = ledger
        self.role = role
        self._what = what
        self._arena: HostArena | None = None
        self.flat = torch.empty(0)
        self.occupy()
        if device.type != "cpu":
            self.flat.zero_()

    @property
    def nbytes(self) -> int:
        """Bytes that it has, or will have again."""
        return self._elements * self._dtype.itemsize

    def occupy(self) -> None:
        """Take memory; its content is undefined unless it is fresh.

        Raises:
            BudgetError: The device budget does not hold the bytes.
        """
        if self._device.type == "cpu":
            self._arena = HostArena(
                self.nbytes,
                ledger=self._ledger,
                role=self.role,
                what=self._what,
                tier=Tier.DEVICE,
            )
            self.flat = self._arena.tensor(self._dtype, offset_bytes=0, elements=self._elements)
            return
        reservation = self._ledger.reserve(Tier.DEVICE, self.role, self.nbytes, what=self._what)
        try:
            self.flat = torch.empty(self._elements, dtype=self._dtype, device=self._device)
        except torch.OutOfMemoryError:
            reservation.release()
            raise
        # The bytes are given back when the last tensor that views them dies.
        weakref.finalize(self.flat.untyped_storage(), reservation.release).atexit = False

    def vacate(self) -> torch.Tensor:
        """Let go of the memory until `occupy`: it is free once the tensor returned has died."""
        flat, self.flat = self.flat, torch.empty(0)
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        return flat

    def close(self) -> None:
        """Let go of the memory; tensors that view it stay valid and keep it alive."""
        self.vacate()
