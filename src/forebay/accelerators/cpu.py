"""The `cpu` accelerator: the host computes, copies run in the same native lanes.

Compute is synchronous with the calling thread, so an event is always already reached.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.accelerators.base import Waitable

__all__ = ["CpuAccelerator"]


@dataclass(frozen=True, slots=True)
class _ReachedEvent:
    handle: int = 0

    def synchronize(self) -> None:
        """It is reached."""


class CpuAccelerator:
    """The host as a device with its own memory budget."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        """Always `cpu`."""
        return self._device

    def copy_engine(self, core: Any) -> Any:
        """Copies are `memcpy` in the lane's thread."""
        return core.MemcpyEngine()

    def new_stream(self) -> int:
        """There are no streams: 0."""
        return 0

    def private_pool(self) -> contextlib.AbstractContextManager[object]:
        """The heap: freed blocks of that size go back to the system."""
        return contextlib.nullcontext()

    def record_event(self) -> _ReachedEvent:
        """An event that is already reached."""
        return _ReachedEvent()

    def wait_for(self, ticket: Waitable) -> None:
        """Block until the transfer is done."""
        ticket.wait()

    def calling_stream(self) -> Callable[[], contextlib.AbstractContextManager[object]]:
        """There are no streams."""
        return contextlib.nullcontext

    def trim(self) -> None:
        """Nothing is cached."""

    def synchronize(self) -> None:
        """Compute is synchronous already."""
