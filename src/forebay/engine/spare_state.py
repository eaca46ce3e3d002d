"""A second state of one part: updates are written there while the first one stays as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay.optim.flat_state import FlatState
from forebay.plan.placement import MasterLayout
from forebay.tiers.host import HostArena
from forebay.tiers.ledger import Role

if TYPE_CHECKING:
    from forebay.engine.part import PartStorage
    from forebay.engine.state_memory import PartMemory

__all__ = ["SpareState"]


class SpareState:
    """Masters, moments and, where masters are whole, new weights.

    Args:
        part: Whose state; it lives on the host.
        memory: Where memory comes from.

    Attributes:
        rounded: Where new weights beside whole masters go; None where the master is the weight.
    """

    def __init__(self, part: PartStorage, *, memory: PartMemory) -> None:
        n, self._part = part.elements, part
        what = f"{n} parameters, a second time"
        masters = HostArena(
            4 * n, ledger=memory.ledger, role=Role.HP_PARAMS, what=f"masters of {what}"
        )
        moments = HostArena(
            8 * n, ledger=memory.ledger, role=Role.OPTIM_STATES, what=f"moments of {what}"
        )
        self._arenas = [masters, moments]
        self.rounded: torch.Tensor | None = None
        self._low: torch.Tensor | None = None
        whole = part.master is MasterLayout.WHOLE
        if part.low is not None:
            self._high = masters.tensor(torch.bfloat16, offset_bytes=0, elements=n)
            self._low = masters.tensor(torch.int16, offset_bytes=2 * n, elements=n)
        else:
            self._high = masters.tensor(torch.float32, offset_bytes=0, elements=n)
        if whole:
            weights = memory.host_arena(
                part.dtype.itemsize * n, role=Role.LP_PARAMS, what=f"new weights of {what}"
            )
            self._arenas.append(weights)
            self.rounded = weights.tensor(part.dtype, offset_bytes=0, elements=n)
        else:  # what goes up to the device
            masters.lock(memory.page_locking, nbytes=self._high.nbytes)
        self._exp_avg = moments.tensor(torch.float32, offset_bytes=0, elements=n)
        self._exp_avg_sq = moments.tensor(torch.float32, offset_bytes=4 * n, elements=n)

    @property
    def flat(self) -> FlatState:
        """Its tensors, as what an update writes."""
        return FlatState(
            high=self._high,
            low=self._low,
            exp_avg=self._exp_avg,
            exp_avg_sq=self._exp_avg_sq,
            out=self.rounded,
            segments=self._part.update_segments,
        )

    @property
    def source(self) -> tuple[int, int, int, int]:
        """Addresses of the part's own state, which an update reads."""
        part = self._part
        return (
            part.high.data_ptr(),
            0 if part.low is None else part.low.data_ptr(),
            part.exp_avg.data_ptr(),
            part.exp_avg_sq.data_ptr(),
        )

    def swap(self) -> None:
        """This becomes the part's state, and the other way round; no byte moves."""
        part = self._part
        mine = (self._high, self._low, self._exp_avg, self._exp_avg_sq)
        assert part.high is not None
        self._high, self._low = part.high, part.low
        self._exp_avg, self._exp_avg_sq = part.exp_avg, part.exp_avg_sq
        part.adopt_state(*mine)

    def close(self) -> None:
        """Give the memory back; the part's own arenas are closed by the part."""
        for arena in self._arenas:
            arena.close()
