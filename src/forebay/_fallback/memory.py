"""Tensors over raw addresses, and the conversions between element types."""

from __future__ import annotations

import ctypes

import torch

__all__ = [
    "DTYPES",
    "check_address",
    "convert",
    "dtype_of",
    "high_half",
    "join",
    "join_values",
    "load",
    "split",
    "split_values",
    "store",
    "view",
]

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of an element type's name.

    Raises:
        ValueError: There is no such type.
    """
    if name not in DTYPES:
        raise ValueError(f"unknown element type {name!r}\nhint: one of {', '.join(DTYPES)}")
    return DTYPES[name]


def check_address(role: str, *, address: int, item: int) -> None:
    """Refuse addresses that cannot hold items of `item` bytes.

    Raises:
        ValueError: The address is zero or not a multiple of the item size.
    """
    if address == 0 or address % item:
        raise ValueError(
            f"address of {role} is {address}, which must be non-zero and a multiple of {item} bytes"
        )


def view(address: int, *, dtype: torch.dtype, elements: int) -> torch.Tensor:
    """A writable tensor over host memory that somebody else owns."""
    if elements == 0:
        return torch.empty(0, dtype=dtype)
    buffer = (ctypes.c_uint8 * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype)


def load(address: int, *, dtype: torch.dtype, elements: int) -> torch.Tensor:
    """A new fp32 tensor with the values at an address; every conversion is exact."""
    return view(address, dtype=dtype, elements=elements).to(torch.float32, copy=True)


def store(values: torch.Tensor, *, address: int, dtype: torch.dtype) -> None:
    """Round fp32 values to `dtype` at an address; bf16 rounds half away from zero."""
    elements = values.numel()
    if dtype is torch.bfloat16:
        view(address, dtype=torch.int16, elements=elements).copy_(high_half(values))
    else:
        view(address, dtype=dtype, elements=elements).copy_(values)


def high_half(values: torch.Tensor) -> torch.Tensor:
    """The bf16 bits (int16) of fp32 values: half away from zero in the bit pattern."""
    bits = values.view(torch.int32)
    rounded = (bits + 0x8000) >> 16
    quiet = (bits >> 16) | 0x40
    return torch.where(values.isnan(), quiet, rounded).to(torch.int16)


def split_values(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bf16 bits and the signed 16-bit distance of fp32 values, both int16."""
    high = high_half(values)
    low = values.view(torch.int32) - (high.to(torch.int32) << 16)
    return high, low.to(torch.int16)


def join_values(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The fp32 values that `split_values` took apart."""
    return ((high.to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def convert(dst: int, dst_dtype: str, src: int, src_dtype: str, elements: int) -> None:
    """Convert element by element, as the native core does."""
    to, origin = dtype_of(dst_dtype), dtype_of(src_dtype)
    if elements == 0:
        return
    check_address("destination", address=dst, item=to.itemsize)
    check_address("source", address=src, item=origin.itemsize)
    if to is origin:
        ctypes.memmove(dst, src, elements * to.itemsize)
        return
    store(load(src, dtype=origin, elements=elements), address=dst, dtype=to)


def split(bits: int, hi: int, low: int, elements: int) -> None:
    """Cut fp32 values into bf16 weights and the 16 bits beside them."""
    high, rest = split_values(view(bits, dtype=torch.float32, elements=elements))
    view(hi, dtype=torch.int16, elements=elements).copy_(high)
    view(low, dtype=torch.int16, elements=elements).copy_(rest)


def join(bits: int, hi: int, low: int, elements: int) -> None:
    """Put fp32 values together again."""
    whole = join_values(
        view(hi, dtype=torch.int16, elements=elements),
        view(low, dtype=torch.int16, elements=elements),
    )
    view(bits, dtype=torch.float32, elements=elements).copy_(whole)
