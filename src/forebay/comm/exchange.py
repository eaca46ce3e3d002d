"""How gradients go between ranks: who adds them up, in which order, and in which type they travel.

A frozen value; `forebay.comm.collectives` acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

__all__ = ["Exchange", "Reduction"]


class Reduction(Enum):
    """Who adds gradients up over ranks."""

    RANKED = "ranked"
    """Slices are exchanged as bytes and added here, in fp32 and in the order of ranks."""
    LIBRARY = "library"
    """NCCL's or gloo's reduce-scatter adds them, in the type in which they travel. Its order
    depends on the library's algorithm: bits are the same at one world size only as long as it
    chooses the same one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What travels between ranks, and how it is added.

    Attributes:
        reduction: Who adds.
        dtype: In what gradients travel; None is their own type, and fp32 for sums of several.
    """

    reduction: Reduction = Reduction.RANKED
    dtype: torch.dtype | None = None

    @property
    def rounds_sums(self) -> bool:
        """Whether a sum of several addends is rounded to travel."""
        return self.dtype not in (None, torch.float32)

    def travels(self, own: torch.dtype, *, is_sum: bool) -> torch.dtype:
        """The type in which a gradient of type `own`, or a sum of several, travels."""
        if self.dtype is not None:
            return self.dtype
        return torch.float32 if is_sum else own
