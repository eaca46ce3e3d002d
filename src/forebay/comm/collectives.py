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
    """Sums of slices go to those who hold the same slices of the other copies."""
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
            fp32 [elements / sharers]: all ranks' values added copy by copy, in the order of each
            one's sharers; or the copies' sums added so, which the library has made.
        """
        group = self.group
        sharers = len(group.sharers)
        copies = group.size // sharers
        self.nbytes[Purpose.GRADIENTS] += flat.nbytes
        if self._exchange.reduction is Reduction.LIBRARY:
            own = flat.new_empty(flat.numel() // sharers)
            group.reduce_scatter(own, flat)
            total = own.to(torch.float32)
            if copies == 1:
                return total
            sums = total.new_empty(copies * total.numel())
            self.gather_copies(sums, total, purpose=Purpose.COPIES)
            return _add_rows(None, sums.view(copies, -1))
        received = torch.empty_like(flat)
        group.all_to_all(received, flat)
        rows = received.view(sharers, -1)
        if copies == 1:
            return _add_rows(None, rows)
        return self._add_by_copies(rows)

    def _add_by_copies(self, rows: torch.Tensor) -> torch.Tensor:
        """Each copy adds its rows to the sum of those before it and hands it on to all others.

        Adding up the copies' own sums would take one exchange instead of one for each copy, and be
        another sum than without copies.
        """
        group = self.group
        total = rows.new_empty(rows.shape[1], dtype=torch.float32)
        for copy in range(group.size // len(group.sharers)):
            if copy == group.copy:
                total = _add_rows(None if copy == 0 else total, rows)
            group.spread_copy(total, copy=copy)
            self.nbytes[Purpose.COPIES] += total.nbytes
        return total

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


def _add_rows(total: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """A fp32 sum, and then rows from the first to the last."""
    if total is None:
        total, rows = rows[0].to(torch.float32, copy=True), rows[1:]
    for row in rows:
        total.add_(row)
    return total
