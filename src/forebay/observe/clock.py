"""When the compute stream reached a point, on the clock of the native lanes.

On `cuda` a point is an event: it is read long after it was recorded, so that nothing waits for
the device. One synchronisation, when the clock is made, ties the two clocks together.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CudaClock", "HostClock", "clock_for"]


class Clock(Protocol):
    """Stamps of the calling thread's compute stream."""

    def stamp(self) -> Any:
        """Mark the present end of the compute stream; cheap."""
        ...

    def is_reached(self, stamp: Any) -> bool:
        """Whether `nanoseconds` would answer without waiting."""
        ...

    def nanoseconds(self, stamp: Any) -> int:
        """When it was reached, as `time.monotonic_ns` counts; only for stamps reached."""
        ...

    def rebase(self, stamp: Any) -> None:
        """Measure from a stamp that was reached on, so that precision does not fade."""
        ...


class HostClock:
    """Compute runs in the calling thread: a point is reached when it is marked."""

    def stamp(self) -> int:
        """Now."""
        return time.monotonic_ns()

    def is_reached(self, stamp: int) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def nanoseconds(self, stamp: int) -> int:
        """The stamp itself."""
        return stamp

    def rebase(self, stamp: int) -> None:
        """Nothing to do."""


class CudaClock:
    """Events of one device.

    Args:
        device: A `cuda` device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero = torch.cuda.Event(enable_timing=True)
        # The one wait: host and device must agree on a moment.
        torch.cuda.synchronize(device)
        self._zero.record(torch.cuda.current_stream(device))
        self._zero.synchronize()
        self._zero_ns = time.monotonic_ns()

    def stamp(self) -> torch.cuda.Event:
        """An event at the end of the caller's current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_reached(self, stamp: torch.cuda.Event) -> bool:
        """Whether the device has passed the event."""
        return bool(stamp.query())

    def nanoseconds(self, stamp: torch.cuda.Event) -> int:
        """By the time that lies between the event and the clock's zero.

        Events resolve half a microsecond; the float32 milliseconds between two of them lose that
        when more than 8 seconds lie in between.
        """
        if not stamp.query():  # recorded just now, on an idle device
            stamp.synchronize()
        return self._zero_ns + round(float(self._zero.elapsed_time(stamp)) * 1e6)

    def rebase(self, stamp: torch.cuda.Event) -> None:
        """Make the event the clock's zero."""
        self._zero_ns, self._zero = self.nanoseconds(stamp), stamp


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
