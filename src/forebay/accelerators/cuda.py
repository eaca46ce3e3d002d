"""The `cuda` accelerator: torch's streams and events, handed to the native lanes as handles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from forebay.accelerators.base import Waitable

__all__ = ["CudaAccelerator", "stream_of"]


def stream_of(handle: int, *, device: torch.device) -> torch.cuda.Stream:
    """The stream behind a handle.

    `torch.cuda.ExternalStream` takes 0, the default stream's handle, for none given and makes a
    stream of its own.
    """
    if handle == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)


class _CudaEvent:
    """A recorded event; the native lane waits for it by handle while this object lives."""

    __slots__ = ("_event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    @property
    def handle(self) -> int:
        return int(self._event.cuda_event)

    def synchronize(self) -> None:
        self._event.synchronize()


class CudaAccelerator:
    """One NVIDIA device.

    Args:
        device: A `cuda` device; without an index, the current one.
    """

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._device = torch.device("cuda", index)
        self._streams: list[torch.cuda.Stream] = []
        torch.cuda.init()
        self._pool: torch.cuda.MemPool | None = None

    @property
    def device(self) -> torch.device:
        """The device with its index."""
        return self._device

    def copy_engine(self, core: Any) -> Any:
        """The CUDA driver's copy functions, found at run time by the native core."""
        return core.CudaEngine(self._device.index)

    def new_stream(self) -> int:
        """A side stream for one lane."""
        stream = torch.cuda.Stream(self._device)
        self._streams.append(stream)
        return int(stream.cuda_stream)

    def private_pool(self) -> AbstractContextManager[object]:
        """A memory pool of torch's allocator, made at first need."""
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        context: AbstractContextManager[object] = torch.cuda.use_mem_pool(
            self._pool, device=self._device
        )
        return context

    def record_event(self) -> _CudaEvent:
        """Mark the end of the caller's current stream."""
        return _CudaEvent(torch.cuda.current_stream(self._device))

    def wait_for(self, ticket: Waitable) -> None:
        """Let the caller's current stream wait for the last piece, once it is enqueued."""
        ticket.wait_issued()
        ticket.stream_wait(int(torch.cuda.current_stream(self._device).cuda_stream))

    def calling_stream(self) -> Callable[[], AbstractContextManager[object]]:
        """Device and stream are each thread's own."""
        stream = torch.cuda.current_stream(self._device)

        def _entered() -> AbstractContextManager[object]:
            context: AbstractContextManager[object] = torch.cuda.stream(stream)
            return context

        return _entered

    def trim(self) -> None:
        """Give the caching allocator's free blocks back.

        What a model left behind lies in pieces that its activations would not fit into.
        """
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for every stream of the device."""
        torch.cuda.synchronize(self._device)
