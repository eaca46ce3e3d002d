"""Which accelerator serves a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay.accelerators.cpu import CpuAccelerator
from forebay.accelerators.cuda import CudaAccelerator
from forebay.errors import UnsupportedError

if TYPE_CHECKING:
    from forebay.accelerators.base import Accelerator

__all__ = ["accelerator_for", "default_device", "device_name"]


def default_device() -> torch.device:
    """The current CUDA device where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """The accelerator's name as its vendor gives it; "cpu" without one."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def accelerator_for(device: torch.device | str | None = None) -> Accelerator:
    """The accelerator that serves `device`.

    Args:
        device: A torch device; None means `default_device()`.

    Raises:
        UnsupportedError: A device type without an accelerator here, or CUDA without a GPU.
    """
    chosen = default_device() if device is None else _parsed(device)
    if chosen.type == "cpu":
        return CpuAccelerator()
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise UnsupportedError(
                f"device {chosen} was asked for, but this torch sees no CUDA device",
                hint='use device="cpu", or install a CUDA build of torch and check nvidia-smi',
            )
        return CudaAccelerator(chosen)
    raise UnsupportedError(
        f"device type {chosen.type!r} is not supported",
        hint="forebay runs on cuda and cpu devices",
    )


def _parsed(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(
            f"device {device!r} is no device that torch knows",
            hint="forebay runs on cuda and cpu devices",
        ) from error
