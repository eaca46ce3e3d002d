"""A landing place: host memory of one part's gradient, in its own dtype or as fp32 sums."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import torch

from forebay.model.layout import ITEM_BYTES
from forebay.tiers.ledger import Role

if TYPE_CHECKING:
    from forebay.engine.state_memory import PartMemory
    from forebay.tiers.host import HostArena

__all__ = ["GradientForm", "Landing"]


class GradientForm(Enum):
    """In what dtype a part's gradient lies on the host."""

    NATIVE = "native"
    """The working dtype: each parameter has one addend."""
    FP32 = "fp32"
    """fp32 sums."""


class Landing:
    """The place, which may become wider.

    Args:
        elements: Elements of the part's shard.
        dtype: The part's working dtype, a key of `ITEM_BYTES`.
        form: What it is made for.
        memory: Where memory comes from.
        arena: The place itself, where there is one already.

    Attributes:
        form: What it holds now.
        spare: The narrow place that a wide one has replaced, while its bytes are still read.
    """

    def __init__(
        self,
        elements: int,
        *,
        dtype: str,
        form: GradientForm,
        memory: PartMemory,
        arena: HostArena | None = None,
    ) -> None:
        self._elements = elements
        self._native = dtype
        self._memory = memory
        self.form = form
        self.arena = self._make(form) if arena is None else arena
        self.spare: HostArena | None = None

    def _make(self, form: GradientForm) -> HostArena:
        native = form is GradientForm.NATIVE
        return self._memory.host_arena(
            (ITEM_BYTES[self._native] if native else 4) * self._elements,
            role=Role.LP_GRADS if native else Role.CONTIGUOUS_GRAD_BUFFER,
            what=f"gradients of {self._elements} parameters",
        )

    @property
    def dtype(self) -> str:
        """Dtype of the landed gradient."""
        return self._native if self.form is GradientForm.NATIVE else "float32"

    def flat(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it, flat."""
        return self.arena.tensor(dtype, offset_bytes=0, elements=self._elements)

    def widen(self) -> int:
        """Give the gradient fp32 room; returns the address of the native landing place.

        The narrow place is kept in `spare` until `drop_spare`, since its bytes are still to be
        added. Raises BudgetError where the wide one does not fit.
        """
        wide = self._make(GradientForm.FP32)
        self.spare, self.arena = self.arena, wide
        self.form = GradientForm.FP32
        return self.spare.address

    def prepare_sums(self) -> None:
        """Make the place wide while nothing is in it (nor in use by any lane)."""
        if self.form is GradientForm.NATIVE and ITEM_BYTES[self._native] < 4:
            self.widen()
        self.drop_spare()

    def drop_spare(self) -> None:
        """Give back the narrow place."""
        if self.spare is not None:
            self.spare.close()
            self.spare = None

    def close(self) -> None:
        """Give all memory back."""
        self.arena.close()
        self.drop_spare()
