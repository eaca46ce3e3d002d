"""Where the sums over ranks of one part are in the present window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["RankSums"]


@dataclass(slots=True)
class RankSums:
    """A part's gradient over all ranks.

    Attributes:
        here: fp32 sums that have not left the device, as long as the part's shard.
        have_landed: Sums are on the host; what comes now is added to them there.
        have_grown: That has happened.
        is_spread: This rank's gradients were given to the others: none of them can be read here.
    """

    here: torch.Tensor | None = None
    have_landed: bool = False
    have_grown: bool = False
    is_spread: bool = False

    def forget(self) -> None:
        """The window is over."""
        self.here = None
        self.have_landed = self.have_grown = self.is_spread = False
