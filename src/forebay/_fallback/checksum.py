"""CRC-32C by tables, many stretches of the bytes side by side.

The register is linear in the bytes, so stretches are summed apart and joined: what a register
becomes by n more bytes is a 32x32 matrix of bits.
"""

from __future__ import annotations

import functools
from typing import Final

import torch

from forebay._fallback.memory import check_address, view

__all__ = ["crc32c"]

_POLYNOMIAL: Final = 0x82F63B78
_MASK: Final = 0xFFFFFFFF
# Stretches of so many bytes; what is left over is summed byte by byte.
_STRETCH: Final = 512


def crc32c(address: int, nbytes: int, seed: int = 0) -> int:
    """The checksum of bytes that follow bytes of the checksum `seed`, as the native core has it.

    Raises:
        ValueError: The address is zero and there are bytes.
    """
    if nbytes == 0:
        return seed
    check_address("bytes", address=address, item=1)
    data = view(address, dtype=torch.uint8, elements=nbytes)
    crc = seed ^ _MASK
    stretches = nbytes // _STRETCH
    while stretches:  # powers of two of stretches, largest first
        rows = 1 << (stretches.bit_length() - 1)
        taken = rows * _STRETCH
        crc = _apply(_shift(taken), crc) ^ _of_rows(data[:taken].view(rows, _STRETCH))
        data, stretches = data[taken:], stretches - rows
    table = _table().tolist()
    for byte in data.tolist():
        crc = (crc >> 8) ^ table[(crc ^ byte) & 0xFF]
    return crc ^ _MASK


def _of_rows(data: torch.Tensor) -> int:
    """The register after rows of bytes (rows a power of two), from zero."""
    table = _table()
    crc = torch.zeros(data.shape[0], dtype=torch.int64)
    for column in data.t().contiguous().to(torch.int64):
        crc = (crc >> 8) ^ table[(crc ^ column) & 0xFF]
    length = data.shape[1]
    while len(crc) > 1:
        matrix = torch.tensor(_shift(length))
        bits = (crc[0::2, None] >> torch.arange(32)) & 1
        moved = torch.zeros_like(crc[0::2])
        for bit in range(32):
            moved ^= bits[:, bit] * matrix[bit]
        crc = moved ^ crc[1::2]
        length *= 2
    return int(crc[0])


@functools.cache
def _table() -> torch.Tensor:
    """The register after one byte, by byte."""
    crc = torch.arange(256)
    for _ in range(8):
        crc = (crc >> 1) ^ (crc & 1) * _POLYNOMIAL
    return crc


@functools.cache
def _shift(nbytes: int) -> tuple[int, ...]:
    """The images of the register's 32 bits after a power of two of zero bytes."""
    if nbytes == 1:
        table = _table().tolist()
        return tuple((one >> 8) ^ table[one & 0xFF] for one in (1 << bit for bit in range(32)))
    half = _shift(nbytes // 2)
    return tuple(_apply(half, image) for image in half)


def _apply(matrix: tuple[int, ...], crc: int) -> int:
    image = 0
    for bit in range(32):
        if crc >> bit & 1:
            image ^= matrix[bit]
    return image
