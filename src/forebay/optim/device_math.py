"""Arithmetic where gradients and device-resident state live: squares, fp32 sums, updates.

`HostMath` serves the `cpu` accelerator with the native pool, `CudaMath` an NVIDIA device in the
order of its compute stream. Both give the same bits.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from typing import TYPE_CHECKING, Any, Protocol

import torch

from forebay.errors import ForebayWarning
from forebay.optim.flat_state import dtype_name, native_hypers, native_part
from forebay.optim.readback import read_numbers
from forebay.optim.reference import AdamState, update_
from forebay.optim.squares import square_blocks, square_sum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.optim.flat_state import FlatState
    from forebay.optim.rule import Hyper

__all__ = [
    "CudaMath",
    "DeviceMath",
    "HostMath",
    "cuda_math",
    "device_square_blocks",
    "math_for",
]


class DeviceMath(Protocol):
    """What the engine computes on the device.

    Calls, in order: `square_sums` as gradients become final; `read` once per step; then `update`
    for units whose state lives on the device.
    """

    def square_sums(self, indices: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Begin summing squares of contiguous tensors; a later call for an index replaces it."""

    def read(self) -> dict[int, float]:
        """Wait for the sums begun since the last `read`: one fp64 for each index."""
        ...

    def update(
        self,
        state: FlatState,
        *,
        grads: Sequence[torch.Tensor | None],
        hypers: Sequence[Hyper],
        hyper_of_segment: Sequence[int],
        scale: float,
    ) -> None:
        """Update the segments whose gradient is given, in the order of the compute stream."""


class HostMath:
    """The device is the host: the native pool does the work.

    Args:
        core: The native core.
        pool: Its worker pool.
    """

    def __init__(self, core: Any, pool: Any) -> None:
        self._core = core
        self._pool = pool
        self._begun: list[tuple[list[int], Any, list[torch.Tensor]]] = []

    def square_sums(self, indices: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """See `DeviceMath`."""
        for _, ticket, summed in self._begun[:-1]:
            # gradients that left would live on here; one sum behind keeps the pool busy
            ticket.wait()
            summed.clear()
        by_dtype: dict[torch.dtype, list[int]] = {}
        for position, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append(position)
        for dtype, positions in by_dtype.items():
            members = [tensors[i] for i in positions]
            spans = [(t.data_ptr(), t.numel()) for t in members]
            ticket = self._pool.square_sums(spans, dtype_name(dtype), [])
            self._begun.append(([indices[i] for i in positions], ticket, members))

    def read(self) -> dict[int, float]:
        """See `DeviceMath`."""
        sums: dict[int, float] = {}
        for indices, ticket, _ in self._begun:
            ticket.wait()
            sums.update(zip(indices, ticket.results(), strict=True))
        self._begun.clear()
        return sums

    def update(
        self,
        state: FlatState,
        *,
        grads: Sequence[torch.Tensor | None],
        hypers: Sequence[Hyper],
        hyper_of_segment: Sequence[int],
        scale: float,
    ) -> None:
        """See `DeviceMath`; returns when the update is done."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for position, grad in enumerate(grads):
            if grad is not None and hyper_of_segment[position] >= 0:
                by_dtype.setdefault(grad.dtype, []).append(position)
        numbers = native_hypers(self._core, hypers)
        for dtype, positions in by_dtype.items():
            part = native_part(self._core, state, grad=0, grad_dtype=dtype_name(dtype))
            chosen, addresses = [-1] * len(grads), [0] * len(grads)
            for position in positions:
                grad = grads[position]
                assert grad is not None
                chosen[position] = hyper_of_segment[position]
                addresses[position] = grad.data_ptr()
            piece = max(1, state.exp_avg.numel())
            self._pool.update(part, numbers, chosen, scale, piece, addresses, []).wait()


class CudaMath:
    """An NVIDIA device, in the order of the current stream, by torch operations.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[int, torch.Tensor] = {}

    def square_sums(self, indices: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """See `DeviceMath`."""
        for index, tensor in zip(indices, tensors, strict=True):
            self._sums[index] = square_sum(tensor)

    def read(self) -> dict[int, float]:
        """See `DeviceMath`; one transfer for all sums."""
        if not self._sums:
            return {}
        values = read_numbers(torch.stack([value.reshape(()) for value in self._sums.values()]))
        sums = dict(zip(self._sums, values, strict=True))
        self._sums.clear()
        return sums

    def update(
        self,
        state: FlatState,
        *,
        grads: Sequence[torch.Tensor | None],
        hypers: Sequence[Hyper],
        hyper_of_segment: Sequence[int],
        scale: float,
    ) -> None:
        """See `DeviceMath`."""
        for position, (start, elements) in enumerate(state.segments):
            grad = grads[position]
            if grad is None or hyper_of_segment[position] < 0 or elements == 0:
                continue
            chosen = slice(start, start + elements)
            update_(
                AdamState(
                    master=state.high[chosen],
                    low=None if state.low is None else state.low[chosen],
                    exp_avg=state.exp_avg[chosen],
                    exp_avg_sq=state.exp_avg_sq[chosen],
                ),
                grad=grad.reshape(-1),
                scale=scale,
                hyper=hypers[hyper_of_segment[position]],
                out=None if state.out is None else state.out[chosen],
            )


def cuda_math(device: torch.device) -> DeviceMath:
    """Triton kernels where they can be built (Triton comes with CUDA builds of torch), else torch.

    Both give the same bits; torch's operations read memory several times as often.
    """
    if not _triton_works(device):
        return CudaMath(device)
    from forebay.optim.triton_math import TritonMath

    return TritonMath(device)


def device_square_blocks(values: torch.Tensor) -> torch.Tensor:
    """`forebay.optim.squares.square_blocks` on an NVIDIA device, by the same choice of kernels."""
    if not _triton_works(values.device):
        return square_blocks(values)
    from forebay.optim.triton_math import block_sums

    return block_sums(values)


@functools.cache
def _triton_works(device: torch.device) -> bool:
    """Whether Triton can build a kernel and run it, with one warning where it is there and cannot.

    It calls a C compiler, which machines that only run training may lack: that is found out when
    an engine is made, and not in the first step of a run.
    """
    if not _has_triton():
        return False
    try:
        from forebay.optim.triton_math import TritonMath

        math = TritonMath(device)
        math.square_sums([0], [torch.ones(1, device=device)])
        math.read()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        last = (str(error).strip() or type(error).__name__).splitlines()[-1]
        warnings.warn(
            f"Triton cannot build a kernel here ({type(error).__name__}: {last}): torch's own "
            "operations do its work on the device; the bits are the same, they take longer\n"
            "hint: install a C compiler, or name one in the environment variable CC",
            ForebayWarning,
            stacklevel=2,
        )
        return False
    return True


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def math_for(device: torch.device, *, core: Any, pool: Any) -> DeviceMath:
    """What computes on a device: the pool's threads where that is the host."""
    return HostMath(core, pool) if device.type == "cpu" else cuda_math(device)
