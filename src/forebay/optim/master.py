"""The split master: an fp32 value as a bf16 weight and the 16 bits that complete it.

The bf16 half is rounded half away from zero in the bit pattern, so the other half is a signed
16-bit difference and the pair is lossless, ties included (round half to even would lose the
upper tie, +32768). These functions allocate their results; they update nothing in place.

[Note: half away] A bf16 working weight is rounded this way in *every* layout, whole masters too,
so that the layout of the master never changes a bit of training.
"""

from __future__ import annotations

import torch

__all__ = ["join", "round_bf16", "split", "split_into"]

# Splitting takes some 24 bytes of temporary memory per element: 24 MiB at once.
_CHUNK_ELEMENTS = 1 << 20


def round_bf16(value: torch.Tensor) -> torch.Tensor:
    """Round fp32 to bf16, half away from zero; a NaN stays a (quiet) NaN.

    Args:
        value: fp32, any shape, CPU or CUDA.
    """
    return _high(value).to(torch.int16).view(torch.bfloat16)


def split(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split fp32 into its bf16 rounding and an int16 rest; `join` gives the same bits back.

    Returns:
        The high half (bf16) and the low half (int16): the bits equal
        `(high_bits << 16) + low` as a 32-bit integer.
    """
    high = _high(value)
    # The subtraction leaves the low 16 bits alone; the narrowing keeps just those.
    return high.to(torch.int16).view(torch.bfloat16), _bits(value).to(torch.int16)


def join(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Put a split master together again.

    Args:
        high: bf16.
        low: int16 (or uint16 of the same bits), same shape.
    """
    upper = high.contiguous().view(torch.int16).to(torch.int32) << 16
    return (upper + low.view(torch.int16).to(torch.int32)).view(torch.float32)


def split_into(high: torch.Tensor, low: torch.Tensor, value: torch.Tensor) -> None:
    """Write a master's halves; temporary memory is bounded, whatever its size.

    Args:
        high: bf16, flat, changed.
        low: int16, as long, on the same device, changed.
        value: The master, as long, in any dtype and on any device.
    """
    if value.dtype is torch.bfloat16:
        high.copy_(value)
        low.zero_()
        return
    for start in range(0, value.numel(), _CHUNK_ELEMENTS):
        chunk = slice(start, start + _CHUNK_ELEMENTS)
        single = value[chunk].to(device=high.device, dtype=torch.float32)
        high[chunk], low[chunk] = split(single)


def _bits(value: torch.Tensor) -> torch.Tensor:
    if value.dtype is not torch.float32:
        raise TypeError(f"a master is float32, not {value.dtype}")
    return value.contiguous().view(torch.int32)


def _high(value: torch.Tensor) -> torch.Tensor:
    """The upper 16 bits after rounding, as int32.

    Largest finite value: 0x7F7FFFFF + 0x8000 = 0x7F807FFF, infinity and no overflow. A NaN must
    not be added to (0x7FFFFFFF would become -0); its quiet bit is set instead.
    """
    bits = _bits(value)
    return torch.where(torch.isnan(value), (bits >> 16) | 0x0040, (bits + 0x8000) >> 16)
