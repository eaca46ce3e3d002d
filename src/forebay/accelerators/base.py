"""What forebay needs of a device that computes: streams, events, a copy engine.

Not an abstraction of all that torch can do: only the calls that the engine makes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

__all__ = ["Accelerator", "Event", "Waitable"]


class Event(Protocol):
    """A point in the compute stream that a lane can wait for."""

    @property
    def handle(self) -> int:
        """Native handle for the copy engine; 0 where compute is synchronous."""
        ...

    def synchronize(self) -> None:
        """Block the host until the point is reached."""
        ...


class Waitable(Protocol):
    """The part of a native ticket that a device needs to wait for a transfer."""

    def wait(self, timeout_s: float = -1) -> bool:
        """Block until every piece is done; False on time-out, raises on failure."""
        ...

    def wait_issued(self, timeout_s: float = -1) -> bool:
        """Block until every piece is enqueued on the lane's stream."""
        ...

    def stream_wait(self, stream: int) -> None:
        """Make a device stream wait for the last piece."""
        ...


class Accelerator(Protocol):
    """One device.

    Calls, in the order in which an engine makes them: `copy_engine` and `new_stream` once per
    lane; per unit `record_event` before its gradients leave and
    `wait_for` before its weights are read; `synchronize` at barriers.
    """

    @property
    def device(self) -> torch.device:
        """Where weights and activations live."""
        ...

    def copy_engine(self, core: Any) -> Any:
        """The native copy-engine table for this device."""
        ...

    def new_stream(self) -> int:
        """A stream for one lane; 0 where copies need none. Lives as long as the accelerator."""
        ...

    def private_pool(self) -> AbstractContextManager[object]:
        """Inside it, tensors get memory that nobody else's tensors get, and return it there."""
        ...

    def record_event(self) -> Event:
        """Mark the present end of the compute stream of the calling thread."""
        ...

    def wait_for(self, ticket: Waitable) -> None:
        """Order the compute stream of the calling thread after a transfer.

        Blocks the host only until the transfer is enqueued, never until it has happened,
        where the device has streams of its own.
        """
        ...

    def calling_stream(self) -> Callable[[], AbstractContextManager[object]]:
        """What makes the calling thread's compute stream that of another thread."""
        ...

    def trim(self) -> None:
        """Give memory that is cached for later allocations back to the device."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done everything enqueued so far."""
        ...
