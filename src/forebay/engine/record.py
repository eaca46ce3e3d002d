"""One trained parameter at run time: its gradient's state in the present window."""

from __future__ import annotations

import weakref
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from forebay.engine.standin import StandIn
from forebay.errors import GradientError
from forebay.links.lanes import wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from forebay.engine.part import PartStorage
    from forebay.model.layout import ParamSlot, Segment

__all__ = ["GradientState", "ParamRecord"]


class GradientState(Enum):
    """Where a parameter's gradient is in the present window."""

    # Enum's own runs in Python; transitions are looked up for every parameter several times a step.
    __hash__ = object.__hash__

    ABSENT = "absent"
    """No addend yet, or discarded: the update skips the parameter."""
    OPEN = "open"
    """On the device, and more addends may come."""
    LANDED = "landed"
    """On the host or on its way there; a further addend is added there."""
    UPDATED = "updated"
    """Used by an update that ran during backward; `step()` has still to confirm it."""
    CONSUMED = "consumed"
    """Used by an update (or skipped with it); only zero_grad may follow."""


# What may follow what; `ABSENT` may follow anything (p.grad = None discards).
_NEXT = {
    GradientState.ABSENT: {GradientState.OPEN, GradientState.CONSUMED},
    GradientState.OPEN: {
        GradientState.OPEN,
        GradientState.LANDED,
        GradientState.UPDATED,
        GradientState.CONSUMED,
    },
    # a sum on the host comes back to the device with the state that is updated there
    GradientState.LANDED: {
        GradientState.LANDED,
        GradientState.OPEN,
        GradientState.UPDATED,
        GradientState.CONSUMED,
    },
    GradientState.UPDATED: {GradientState.CONSUMED},
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
        arrival: The copy that brings `total` from the host, until it is known to be done.
        firings: Firings in the present backward.
        expected: Firings that the present backward will have, by the last one; a hint.
        captured: The addend that autograd just added into the stand-in.
        zeroed: The gradient was set to zero and got no addend since.
        was_given: This rank's gradient is part of a sum over ranks.
        pending: The parameter views NaN until its new weights have arrived.
        away: The NaN that it views while its weights are on the host alone, once there is one.
        master_is_loaded: The master came with a state dict and belongs to weights that may be
            loaded after it.
        loaded: What such a master came as if its part keeps masters in the other form (the low
            half, or all of it), until its weights are known.
        on_rebase: Told when master and weight were set from outside of updates.
        holds_back: Says whether the weight is older than its master, as training wants it.
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
        self.arrival: Any = None
        self.firings = 0
        self.expected = 1
        self.captured: torch.Tensor | None = None
        self.zeroed = False
        self.was_given = False
        self.pending = False
        self.away: torch.Tensor | None = None
        self.master_is_loaded = False
        self.loaded: torch.Tensor | None = None
        self.on_rebase: Callable[[ParamRecord], None] | None = None
        self.holds_back: Callable[[ParamRecord], bool] | None = None
        self._standin: StandIn | None = None
        # What owns stand-ins that were kept past their window.
        self._gone = _Gone(slot.names[0])

    @property
    def standin(self) -> StandIn:
        """What `p.grad` holds while the gradient is ours.

        A new one after each discard, so that one kept from an earlier window never shows this
        window's gradient; made when first asked for, in backward, where nobody waits for it.
        """
        if self._standin is None:
            # A proxy: the collector of garbage does not see what p.grad holds.
            self._standin = StandIn(
                self.part.weight(self.slot), weakref.proxy(self), device=self.part.device
            )
        return self._standin

    def holds(self, grad: torch.Tensor | None) -> bool:
        """Whether what `p.grad` holds is the present stand-in."""
        return grad is not None and grad is self._standin

    @property
    def segment(self) -> Segment:
        """What this rank holds of the parameter's state."""
        return self.part.segments[self.index]

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
        """Autograd added into the stand-in.

        Raises:
            GradientError: The gradient is used up, or it was not autograd that added.
        """
        if torch._C._current_graph_task_id() < 0 or self.captured is not None:
            raise GradientError(
                f"p.grad of {self.label} was added to outside of autograd's own sum, but that "
                "gradient has left for the host",
                hint="change gradients in p.register_hook(...), or put a tensor of your own into "
                "p.grad",
            )
        if self.state is GradientState.CONSUMED:
            raise GradientError(
                f"p.grad of {self.label} was used by the last step() and not cleared since",
                hint="call zero_grad() after step(), before the next backward",
            )
        self.captured = addend

    @property
    def has_local(self) -> bool:
        """Whether there is a gradient here that has not gone anywhere."""
        return bool(self.addends) or self.total is not None or self.zeroed

    def give_away(self) -> None:
        """What was summed here went into a sum over ranks."""
        self.addends.clear()
        self.total = None
        self.zeroed = False
        self.was_given = True

    def zero(self) -> None:
        """The gradient is present with value 0."""
        self.refuse_given("set to zero")
        self._refuse_if_updated()
        self._forget(GradientState.ABSENT)
        self.zeroed = True
        self.move(GradientState.OPEN)

    def read(self) -> torch.Tensor:
        """The exact gradient so far, on the parameter's device.

        Raises:
            GradientError: It was consumed, or its fp32 sum does not fit the parameter's dtype.
        """
        self.refuse_given("read")
        value = self.exact()
        if value.dtype is not self.param.dtype:
            raise GradientError(
                f"p.grad of {self.label} is a sum in {value.dtype}, which {self.param.dtype} "
                "cannot hold exactly",
                hint="read it with forebay.utils.safe_get_full_grad(p)",
            )
        return value.to(self.param.device)

    def exact(self) -> torch.Tensor:
        """The gradient so far: the one addend in its own dtype, or the fp32 sum.

        Raises:
            GradientError: There is none any more.
            TransferError: Its way to the host failed.
        """
        self._refuse_if_updated()
        if self.state in {GradientState.CONSUMED, GradientState.ABSENT}:
            raise GradientError(
                f"p.grad of {self.label} is gone: the last step() used it",
                hint="read it before step(), or use optimizer.last_grad_norm for its norm",
            )
        terms = []
        if self.state is GradientState.LANDED:
            if self.part.ticket is not None:
                wait(self.part.ticket, f"the way of the gradient of {self.label} to the host")
            terms.append(self.part.gradient(self.slot).clone())
        elif self.total is not None:
            self.await_sum()
            terms.append(self.total)
        terms += self.addends
        if self.captured is not None:
            terms.append(self.captured)
        if not terms:  # zeroed
            return torch.zeros(self.slot.shape, dtype=self.part.dtype, device=self.param.device)
        value = terms[0]
        for term in terms[1:]:
            value = value.float() + term.to(value.device)
        return value.reshape(self.slot.shape)

    def refuse_given(self, verb: str) -> None:
        """Raise GradientError where this rank's gradient is part of a sum over ranks."""
        if self.was_given and self.state is not GradientState.CONSUMED:
            raise GradientError(
                f"p.grad of {self.label} cannot be {verb} any more: its sum over the ranks is "
                "spread over them",
                hint="use optimizer.last_grad_norm for the norm, clip_norm=... to clip, or "
                "forebay.utils.safe_get_full_grad(p) on every rank",
            )

    def device_value(self) -> torch.Tensor:
        """Sum what is on the device: one tensor, own dtype if it is a single addend."""
        if self.zeroed and not self.addends and self.total is None:
            self.addends = [
                torch.zeros(self.slot.shape, dtype=self.part.dtype, device=self.param.device)
            ]
        if self.total is None and len(self.addends) == 1:
            return self.addends[0]
        self.await_sum()
        for addend in self.addends:
            # addends are added in fp32 in order of firing (law 1a)
            if self.total is None:
                self.total = addend.to(torch.float32, copy=True)
            else:
                self.total.add_(addend)
        self.addends.clear()
        assert self.total is not None
        return self.total

    def return_sum(self, total: torch.Tensor, arrival: Any) -> None:
        """The fp32 sum of earlier backwards is on its way from the host into `total`."""
        self.total, self.arrival = total, arrival
        self.move(GradientState.OPEN)

    def await_sum(self) -> None:
        """Return once the sum that comes from the host is here."""
        if self.arrival is not None:
            wait(self.arrival, f"the gradient sum of {self.label} on its way to the device")
            self.arrival = None

    @property
    def is_held_back(self) -> bool:
        """Whether training computes with a weight that is older than the master."""
        return self.holds_back is not None and self.holds_back(self)

    def rebase(self) -> None:
        """Master and weight were set from outside of updates, and agree as they are now."""
        self.version = self.param._version
        if self.on_rebase is not None:
            self.on_rebase(self)

    def discard(self) -> None:
        """Forget the gradient: absent. Whoever kept its stand-in cannot read it any more."""
        if self.state is not GradientState.ABSENT and self._standin is not None:
            self._standin.owner = self._gone
            self._standin = None
        self._forget(GradientState.ABSENT)

    def _refuse_if_updated(self) -> None:
        if self.state is GradientState.UPDATED:
            raise GradientError(
                f"p.grad of {self.label} is gone: its unit was updated during backward",
                hint="set bf16.check_grad_overflow to true, and gradients stay until step()",
            )

    def use_early(self) -> None:
        """An update that runs during backward uses the gradient."""
        self._forget(GradientState.UPDATED)

    def consume(self) -> None:
        """The step used (or skipped) the gradient."""
        self._forget(GradientState.CONSUMED)

    def _forget(self, state: GradientState) -> None:
        if self.addends:
            self.addends.clear()
        self.total = self.arrival = self.captured = None
        self.zeroed = False
        if self.was_given:
            self.was_given = state is GradientState.ABSENT and self.part.sums.is_spread
        self.move(state)


class _Gone:
    """Owner of a stand-in whose gradient was discarded."""

    def __init__(self, label: str) -> None:
        self.label = label

    def _refuse(self) -> GradientError:
        return GradientError(
            f"this tensor was p.grad of {self.label} in a window that is over",
            hint="clone() a gradient that is to be kept",
        )

    def read(self) -> torch.Tensor:
        raise self._refuse()

    def zero(self) -> None:
        raise self._refuse()

    def add_addend(self, addend: torch.Tensor) -> None:
        del addend
        raise self._refuse()
