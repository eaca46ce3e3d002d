"""What ranks do with flat tensors: add slices up in rank order, gather slices. Bytes are counted.

The additions are ours; the group only carries bytes (law 1b).
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from forebay.comm.group import Group

__all__ = ["Collectives", "Purpose"]


class Purpose(Enum):
    """What a collective is for."""

    GRADIENTS = "gradients"
    """Slices of gradients go to the ranks that add them up."""
    SUMS = "sums"
    """The sums go to everybody (stage 0)."""
    WEIGHTS = "weights"
    """New or sharded weights go to everybody."""
    STATE = "state"
    """Somebody asked for whole values of something sharded."""


class Collectives:
    """Runs collectives and counts their bytes.

    Args:
        group: The ranks.

    Attributes:
        nbytes: By purpose, the bytes of the whole tensors exchanged or gathered: what ZeRO's
            papers call M. Of it `(size - 1) / size` leaves and reaches a rank.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.nbytes: Counter[Purpose] = Counter()

    def add_slices(self, flat: torch.Tensor) -> torch.Tensor:
        """Exchange a flat gradient and add up this rank's slice.

        Args:
            flat: [elements], the same length and dtype on every rank; divisible by their number.

        Returns:
            fp32 [elements / size]: the ranks' values, added in rank order.
        """
        received = torch.empty_like(flat)
        self.group.all_to_all(received, flat)
        self.nbytes[Purpose.GRADIENTS] += flat.nbytes
        pieces = received.view(self.group.size, -1)
        total = pieces[0].to(torch.float32, copy=True)
        for piece in pieces[1:]:
            total.add_(piece)
        return total

    def gather(self, whole: torch.Tensor, own: torch.Tensor, *, purpose: Purpose) -> None:
        """Fill `whole` with every rank's `own`.

        Args:
            whole: [elements].
            own: [elements / size]; may be this rank's slice of `whole`.
            purpose: For the counters.
        """
        shares = own.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        self.group.all_gather(whole, own.clone() if shares else own)
        self.nbytes[purpose] += whole.nbytes
