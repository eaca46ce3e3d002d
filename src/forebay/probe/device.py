"""What the device computes: matrix products by size, copies in its memory.

On `cpu` the device is the processor, with as many threads as torch uses.

[Note: products between copies] A GPU that does nothing but multiply meets its limit of power, and
its clock falls: by an eighth on an H200. In a layer two fifths of the time go to operations that
only move bytes. So products are timed in short batches, with copies between them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from forebay.hardware.profile import MatrixRate
from forebay.probe.timing import seconds_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.accelerators.base import Accelerator

__all__ = ["device_copy", "matrix_rates"]

# From the width of a toy's layers to that of a large model's; a processor's rate settles early.
_SIZES = {"cuda": (512, 1024, 2048, 4096, 8192), "cpu": (64, 128, 256, 512, 1024)}
_DTYPES = {"cuda": ("bfloat16", "float16", "float32"), "cpu": ("float32", "bfloat16")}
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
# Copies between two batches of products: two fifths of the time, as in a layer.
_COPIES = 6


def matrix_rates(accelerator: Accelerator) -> tuple[MatrixRate, ...]:
    """Rates of square products, as a layer has three of each; see [Note: products between copies].

    Of a weight in forward, and of its input's and its own gradient in backward.
    """
    device = accelerator.device
    between = _copies(device) if device.type == "cuda" else None
    found = []
    for dtype in _DTYPES[device.type]:
        for size in _SIZES[device.type]:
            states, weight = (
                torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2)
            )
            seconds = seconds_of(partial(_products, states, weight), accelerator, between=between)
            found.append(MatrixRate(dtype=dtype, size=size, flops=3 * 2 * size**3 / seconds))
    return tuple(found)


def _products(states: torch.Tensor, weight: torch.Tensor) -> None:
    torch.mm(states, weight.t())
    torch.mm(states, weight)
    torch.mm(states.t(), weight)


def device_copy(accelerator: Accelerator) -> float:
    """Bytes per second, read plus written, of a copy far larger than caches."""
    source, target = _buffers(accelerator.device)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), accelerator)


def _buffers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two, far larger than caches."""
    source = torch.zeros(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    return source, torch.empty_like(source)


def _copies(device: torch.device) -> Callable[[], None]:
    source, target = _buffers(device)

    def run() -> None:
        for _ in range(_COPIES):
            target.copy_(source)

    return run
