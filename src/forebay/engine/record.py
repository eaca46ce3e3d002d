"""One trained parameter at run time: its gradient's state in the present window."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import torch

from forebay.engine.standin import StandIn
from forebay.errors import GradientError

if TYPE_CHECKING:
    from torch import nn

    from forebay.engine.part import PartStorage
    from forebay.model.layout import ParamSlot

__all__ = ["GradientState", "ParamRecord"]


class GradientState(Enum):
    """Where a parameter's gradient is in the present window."""

    ABSENT = "absent"
    """No addend yet, or discarded: the update skips the parameter."""
    OPEN = "open"
    """On the device, and more addends may come."""
    LANDED = "landed"
    """On the host or on its way there; a further addend is added there."""
    CONSUMED = "consumed"
    """Used by an update (or skipped with it); only zero_grad may follow."""


# What may follow what; `ABSENT` may follow anything (p.grad = None discards).
_NEXT = {
    GradientState.ABSENT: {GradientState.OPEN, GradientState.CONSUMED},
    GradientState.OPEN: {GradientState.OPEN, GradientState.LANDED, GradientState.CONSUMED},
    GradientState.LANDED: {GradientState.LANDED, GradientState.CONSUMED},
    GradientState.CONSUMED: {GradientState.CONSUMED},
}


class ParamRecord:
    """A parameter, its place, and its gradient so far.

    Attributes:
        param: The user's parameter.
        index: Its `ParamSpec.index`.
        group: Index of its optimizer group.
        slot: Its place in `part`.
        part: The memory of its part.
        unit: Its unit's index.
        step: Its own count of updates.
        version: `param._version` when its master last agreed with it.
        addends: Addends on the device that are not summed or sent yet, in order.
        total: fp32 sum on the device, or None.
        firings: Firings in the present backward.
        expected: Firings that the present backward will have, by the last one; a hint.
        captured: The addend that autograd just added into the stand-in.
        zeroed: The gradient was set to zero and got no addend since.
        pending: The parameter views NaN until its new weights have arrived.
        master_is_loaded: The master came with a state dict and belongs to weights that may be
            loaded after them.
    """

    def __init__(
        self, param: nn.Parameter, *, slot: ParamSlot, part: PartStorage, unit: int, group: int
    ) -> None:
        self.param = param
        self.index = slot.index
        self.group = group
        self.slot = slot
        self.part = part
        self.unit = unit
        self.step = 0
        self.version = param._version
        self.state = GradientState.ABSENT
        self.addends: list[torch.Tensor] = []
        self.total: torch.Tensor | None = None
        self.firings = 0
        self.expected = 1
        self.captured: torch.Tensor | None = None
        self.zeroed = False
        self.pending = False
        self.master_is_loaded = False
        self.standin = StandIn(part.weight(slot), self)

    @property
    def label(self) -> str:
        """The parameter's first name."""
        return self.slot.names[0]

    def move(self, state: GradientState) -> None:
        """Change the gradient's state along the transition table."""
        if state is not GradientState.ABSENT and state not in _NEXT[self.state]:
            raise AssertionError(f"gradient of {self.label}: {self.state} -> {state}")
        self.state = state

    def add_addend(self, addend: torch.Tensor) -> None:
        """Autograd (or the user) added into the stand-in."""
        if self.state is GradientState.CONSUMED:
            raise GradientError(
                f"p.grad of {self.label} was used by the last step() and not cleared since",
                hint="call zero_grad() after step(), before the next backward",
            )
        if self.captured is not None:
            raise GradientError(f"two addends for {self.label} arrived without a hook between")
        self.captured = addend

    def zero(self) -> None:
        """The gradient is present with value 0."""
        self.discard()
        self.zeroed = True
        self.move(GradientState.OPEN)

    def read(self) -> torch.Tensor:
        """The exact gradient so far, on the parameter's device.

        Raises:
            GradientError: It was consumed, or its fp32 sum does not fit the parameter's dtype.
        """
        value = self.exact()
        if value.dtype is not self.param.dtype:
            raise GradientError(
                f"p.grad of {self.label} is a sum in {value.dtype}, which {self.param.dtype} "
                "cannot hold exactly",
                hint="read it with forebay.utils.safe_get_full_grad(p)",
            )
        return value.to(self.param.device)

    def exact(self) -> torch.Tensor:
        """The gradient so far: the one addend in its own dtype, or the fp32 sum."""
        if self.state in {GradientState.CONSUMED, GradientState.ABSENT}:
            raise GradientError(
                f"p.grad of {self.label} is gone: the last step() used it",
                hint="read it before step(), or use optimizer.last_grad_norm for its norm",
            )
        if self.state is GradientState.LANDED:
            if self.part.ticket is not None:
                self.part.ticket.wait()
            return self.part.gradient(self.slot).clone()
        value = self.device_value()
        return value.reshape(self.slot.shape)

    def device_value(self) -> torch.Tensor:
        """Sum what is on the device: one tensor, own dtype if it is a single addend."""
        if self.zeroed and not self.addends and self.total is None:
            self.addends = [
                torch.zeros(self.slot.shape, dtype=self.part.dtype, device=self.param.device)
            ]
        if self.total is None and len(self.addends) == 1:
            return self.addends[0]
        for addend in self.addends:
            # addends are added in fp32 in order of firing (law 1a)
            if self.total is None:
                self.total = addend.to(torch.float32, copy=True)
            else:
                self.total.add_(addend)
        self.addends.clear()
        assert self.total is not None
        return self.total

    def rebase(self) -> None:
        """The master agrees with the weight as it is now."""
        self.version = self.param._version

    def discard(self) -> None:
        """Forget the gradient: absent."""
        self.addends.clear()
        self.total = None
        self.captured = None
        self.zeroed = False
        self.move(GradientState.ABSENT)

    def consume(self) -> None:
        """The step used (or skipped) the gradient."""
        self.addends.clear()
        self.total = None
        self.captured = None
        self.zeroed = False
        self.move(GradientState.CONSUMED)
