"""What ranks do with flat tensors: add slices up in rank order, gather slices. Bytes are counted.

The additions are ours; the group only carries bytes (law 1b).
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING

import torch

from forebay.comm.exchange import Exchange, Reduction

if TYPE_CHECKING:
    from forebay.comm.group import Group

__all__ = ["Collectives", "Purpose"]


class Purpose(Enum):
    """What a collective is for."""

    GRADIENTS = "gradients"
    """Slices of gradients go to the ranks that add them up."""
    COPIES = "copies"
    """Sums of one copy's ranks go to the same slice's owners in the other copies."""
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
        exchange: How gradients are added.

    Attributes:
        nbytes: By purpose, the bytes of the whole tensors exchanged or gathered: what ZeRO's
            papers call M. Of it `(size - 1) / size` leaves and reaches a rank.
    """

    def __init__(self, group: Group, *, exchange: Exchange | None = None) -> None:
        self.group = group
        self._exchange = exchange or Exchange()
        self.nbytes: Counter[Purpose] = Counter()

    def add_slices(self, flat: torch.Tensor) -> torch.Tensor:
        """Exchange a flat gradient and add up this rank's slice.

        Args:
            flat: [elements], the same length and dtype on every rank; divisible by the number of
                sharers.

        Returns:
            fp32 [elements / sharers]: the sharers' values added in their order, then the copies'
            sums in theirs; or added by the library.
        """
        sharers = len(self.group.sharers)
        self.nbytes[Purpose.GRADIENTS] += flat.nbytes
        if self._exchange.reduction is Reduction.LIBRARY:
            own = flat.new_empty(flat.numel() // sharers)
            self.group.reduce_scatter(own, flat)
            total = own.to(torch.float32)
        else:
            received = torch.empty_like(flat)
            self.group.all_to_all(received, flat)
            total = _ordered_sum(received.view(sharers, -1))
        copies = self.group.size // sharers
        if copies == 1:
            return total
        sums = total.new_empty(copies * total.numel())
        self.gather_copies(sums, total, purpose=Purpose.COPIES)
        return _ordered_sum(sums.view(copies, -1))

    def gather(self, whole: torch.Tensor, own: torch.Tensor, *, purpose: Purpose) -> None:
        """Fill `whole` with every sharer's `own`.

        Args:
            whole: [elements].
            own: [elements / sharers]; may be this rank's slice of `whole`.
            purpose: For the counters.
        """
        shares = own.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        self.group.all_gather(whole, own.clone() if shares else own)
        self.nbytes[purpose] += whole.nbytes

    def gather_copies(self, whole: torch.Tensor, own: torch.Tensor, *, purpose: Purpose) -> None:
        """Fill `whole` with the `own` of every copy's rank that holds the same slice, by copy."""
        self.group.gather_copies(whole, own)
        self.nbytes[purpose] += whole.nbytes


def _ordered_sum(pieces: torch.Tensor) -> torch.Tensor:
    """fp32 sum of rows, from the first to the last."""
    total = pieces[0].to(torch.float32, copy=True)
    for piece in pieces[1:]:
        total.add_(piece)
    return total
