"""Boundary activations on the host: what checkpointing keeps goes down, and comes up in time.

A checkpointed region keeps its inputs. Each leaves when the next one has been kept, so that the
last ones, which backward needs first, never travel; backward brings them up two ahead, in the order
in which it asked the last time. Where too many are on their way down, forward waits: else the host
would run ahead of the device, and every activation would be there at once.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from forebay.errors import ForebayWarning
from forebay.plan.activations import ON_THEIR_WAY
from forebay.tiers.ledger import Role

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from forebay.engine.state_memory import PartMemory
    from forebay.links.lanes import Lanes
    from forebay.tiers.host import HostArena

__all__ = ["ActivationStore", "KeptActivation", "is_kept_by_checkpoint"]

# Of a few kilobytes the calls cost more than the memory is worth.
_LEAST_BYTES = 1 << 10


class KeptActivation:
    """One tensor, on the device or on the host."""

    __slots__ = ("__weakref__", "down", "host", "number", "shape", "tensor", "up", "version")

    def __init__(self, tensor: torch.Tensor, *, number: int) -> None:
        self.number = number
        self.tensor: torch.Tensor | None = tensor.detach()
        self.version = tensor._version
        self.shape = tuple(tensor.shape)
        self.host: torch.Tensor | None = None
        self.down: Any = None
        self.up: tuple[torch.Tensor, Any] | None = None


class ActivationStore:
    """Keeps boundary activations on the host.

    Args:
        lanes: The link.
        memory: Where host memory comes from.

    Attributes:
        nbytes: Bytes that went down so far.
        regions: Inputs of checkpointed regions that it was shown so far.
    """

    def __init__(self, lanes: Lanes, *, memory: PartMemory) -> None:
        self._lanes = lanes
        self._memory = memory
        self._last: weakref.ref[KeptActivation] | None = None
        self._leaving: deque[tuple[Any, weakref.ref[KeptActivation]]] = deque()
        # What was kept since all was given back, in order; and the order in which it was given,
        # then and the time before.
        self._kept: list[weakref.ref[KeptActivation]] = []
        self._given: list[int] = []
        self._expected: list[int] = []
        # Arenas that nobody uses, each with the transfers that may still touch it.
        self._idle: list[tuple[HostArena, list[Any]]] = []
        self.nbytes = 0
        self.regions = 0
        self._has_looked = False

    def keep(self, tensor: torch.Tensor) -> KeptActivation | None:
        """Take a tensor that is saved for the backward; None where it should stay as it is."""
        self.regions += 1
        if (
            tensor.nbytes < _LEAST_BYTES
            or not tensor.is_contiguous()
            or tensor.layout is not (torch.strided)
        ):
            return None
        if not any(ref() is not None for ref in self._kept):
            self._expected, self._given = self._given, []
            self._kept.clear()
        kept = KeptActivation(tensor, number=len(self._kept))
        before = self._last() if self._last is not None else None
        if before is not None:
            self._send_down(before)
        self._last = weakref.ref(kept)
        self._kept.append(self._last)
        return kept

    def give(self, kept: KeptActivation) -> torch.Tensor:
        """The tensor, for a node of the backward that is about to use it."""
        self._bring_up_next(kept)
        if kept.tensor is not None:
            if kept.tensor._version != kept.version:
                raise RuntimeError(
                    "an input of a checkpointed region was modified by an inplace operation"
                )
            return kept.tensor
        if kept.up is None:
            self._bring_up(kept)
        assert kept.up is not None
        tensor, ticket = kept.up
        with self._lanes.waiting("activations"):
            self._lanes.accelerator.wait_for(ticket)
        kept.up = None
        self._lanes.reap()  # those given before are held no longer: nothing else may do it
        return tensor

    def look(self) -> None:
        """At the end of the first step: warn where nothing of the model is checkpointed."""
        if self._has_looked:
            return
        self._has_looked = True
        if not self.regions:
            warnings.warn(
                "activations are to wait on the host (cpu_checkpointing), but no part of the model "
                "is checkpointed: all of them stay on the device\n"
                "hint: model.gradient_checkpointing_enable(), or torch.utils.checkpoint for blocks",
                ForebayWarning,
                stacklevel=2,
            )

    def _send_down(self, kept: KeptActivation) -> None:
        tensor = kept.tensor
        if tensor is None or kept.host is not None:
            return
        arena, after = self._arena(tensor.nbytes)
        kept.host = arena.tensor(tensor.dtype, offset_bytes=0, elements=tensor.numel())
        event = self._lanes.accelerator.record_event()
        span = (kept.host.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        kept.down = self._lanes.stow([span], event=event.handle, after=after)
        self._lanes.hold(kept.down, tensor, event, arena)
        self.nbytes += tensor.nbytes
        weakref.finalize(kept, self._idle.append, (arena, [kept.down])).atexit = False
        self._leaving.append((kept.down, weakref.ref(kept)))
        while self._leaving and (len(self._leaving) > ON_THEIR_WAY or self._leaving[0][0].done):
            ticket, leaving = self._leaving.popleft()
            with self._lanes.waiting("activations to leave"):
                ticket.wait()
            gone = leaving()
            if gone is not None:
                gone.tensor = None
        del tensor
        self._lanes.reap()

    def _bring_up_next(self, kept: KeptActivation) -> None:
        """Backward is at `kept`: what it asked for next the last time comes up.

        Where it takes another course than then: what was kept just before.
        """
        at = len(self._given)
        self._given.append(kept.number)
        following = self._expected[at + 1 : at + 1 + ON_THEIR_WAY]
        if self._expected[at : at + 1] != [kept.number]:
            following = [kept.number - 1 - ahead for ahead in range(ON_THEIR_WAY)]
        for number in following:
            one = self._kept[number]() if 0 <= number < len(self._kept) else None
            if one is not None and one.tensor is None and one.up is None:
                self._bring_up(one)

    def _bring_up(self, kept: KeptActivation) -> None:
        assert kept.host is not None
        tensor = torch.empty(
            kept.shape, dtype=kept.host.dtype, device=self._lanes.accelerator.device
        )
        # The allocator may hand out memory that enqueued kernels still use: the copy waits.
        event = self._lanes.accelerator.record_event()
        span = (tensor.data_ptr(), kept.host.data_ptr(), tensor.nbytes)
        ticket = self._lanes.bring_back([span], event=event.handle, after=[kept.down])
        self._lanes.hold(ticket, tensor, event, kept.host)
        kept.up = (tensor, ticket)

    def _arena(self, nbytes: int) -> tuple[HostArena, Sequence[Any]]:
        """Host memory of at least so many bytes, and what has to be done before it is written."""
        fitting = [one for one in self._idle if one[0].nbytes >= nbytes]
        if fitting:
            chosen = min(fitting, key=lambda one: one[0].nbytes)
            self._idle.remove(chosen)
            return chosen[0], chosen[1]
        if self._idle:  # shapes have changed: what is idle is too small
            arena, tickets = self._idle.pop()
            for ticket in tickets:
                ticket.wait()
            arena.close()
        return self._memory.host_arena(nbytes, role=Role.ACTIVATIONS, what="activations"), []

    def close(self) -> None:
        """Give idle memory back."""
        for arena, _ in self._idle:
            arena.close()
        self._idle.clear()


def is_kept_by_checkpoint(frame: FrameType | None) -> bool:
    """Whether `torch.utils.checkpoint` saves an input of a region.

    Args:
        frame: Whoever called for the tensor to be saved.
    """
    for _ in range(2):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False
