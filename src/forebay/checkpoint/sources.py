"""Where the bytes of a tensor that is to be saved come from: pieces, never a whole copy."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Protocol

import torch

from forebay import native
from forebay.checkpoint.header import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.checkpoint.header import TensorSpec

__all__ = ["JoinedSource", "ReadSource", "RoundedSource", "Source", "TensorSource", "round_into"]


class Source(Protocol):
    """The bytes of one tensor.

    Attributes:
        spec: The tensor as a file holds it.
        owner: Who must not change it until it was read; None if nobody will.

    `view` and `fill` are called for ranges that begin at multiples of a mebibyte: by one thread and
    in order where training goes on meanwhile, else by several threads at once.
    """

    spec: TensorSpec
    owner: int | None

    def view(self, begin: int, end: int) -> memoryview | None:
        """Bytes `[begin, end)` where they lie, or None if they must be filled in."""

    def fill(self, begin: int, end: int, *, into: memoryview) -> None:
        """Copy bytes `[begin, end)`."""


class TensorSource:
    """A tensor that lies somewhere, contiguous.

    Args:
        spec: What it is in the file; of as many bytes.
        value: The tensor.
        owner: Who may change it.
    """

    def __init__(self, spec: TensorSpec, value: torch.Tensor, *, owner: int | None = None) -> None:
        self.spec = spec
        self.owner = owner
        flat = value.detach().reshape(-1)
        # reshape keeps 0-dim and contiguous tensors where they are
        self._bytes = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0).byte()
        assert self._bytes.numel() == spec.nbytes, spec.key

    def view(self, begin: int, end: int) -> memoryview | None:
        """The bytes themselves, on the host."""
        if self._bytes.device.type != "cpu":
            return None
        address = self._bytes.data_ptr() + begin
        return memoryview((ctypes.c_char * (end - begin)).from_address(address)).cast("B")

    def fill(self, begin: int, end: int, *, into: memoryview) -> None:
        """Copy bytes; from a device after all that its present stream has been given."""
        torch.frombuffer(into, dtype=torch.uint8).copy_(self._bytes[begin:end])


class JoinedSource:
    """An fp32 master that is kept as a bf16 weight and the 16 bits beside it.

    Args:
        spec: fp32, of as many elements.
        high: The weight.
        low: The rest.
        join: `join(high, low)` by address: (bits, high, low, elements).
        owner: Who may change them.
    """

    def __init__(
        self,
        spec: TensorSpec,
        high: torch.Tensor,
        low: torch.Tensor,
        *,
        join: Any,
        owner: int | None = None,
    ) -> None:
        self.spec = spec
        self.owner = owner
        self._high, self._low = high.detach().reshape(-1), low.detach().reshape(-1)
        self._join = join

    def view(self, begin: int, end: int) -> memoryview | None:
        """Nowhere: they are to be joined."""
        del begin, end
        return None

    def fill(self, begin: int, end: int, *, into: memoryview) -> None:
        """Join elements; temporary memory is half the range where they lie on a device."""
        chunk = slice(begin // 4, end // 4)
        high, low = self._high[chunk].cpu(), self._low[chunk].cpu()
        bits = torch.frombuffer(into, dtype=torch.float32)
        self._join(bits.data_ptr(), high.data_ptr(), low.data_ptr(), bits.numel())


class ReadSource:
    """Elements that somebody reads from where no address leads, such as a file.

    Args:
        spec: What is written; what is read of another dtype is rounded.
        read: `read(begin, end)` gives elements in host memory; called from any thread.
        first: The tensor's first element, as `read` counts.
        owner: Who may change them.
    """

    def __init__(
        self,
        spec: TensorSpec,
        read: Callable[[int, int], torch.Tensor],
        *,
        first: int = 0,
        owner: int | None = None,
    ) -> None:
        self.spec = spec
        self.owner = owner
        self._read = read
        self._first = first
        self._dtype = DTYPES[spec.dtype]

    def view(self, begin: int, end: int) -> memoryview | None:
        """Nowhere: they are to be read."""
        del begin, end
        return None

    def fill(self, begin: int, end: int, *, into: memoryview) -> None:
        """Read elements."""
        item = self._dtype.itemsize
        value = self._read(self._first + begin // item, self._first + end // item)
        target = torch.frombuffer(into, dtype=self._dtype)
        if value.dtype is self._dtype:
            target.copy_(value)
        else:
            round_into(target, value)


class RoundedSource:
    """A float32 tensor that is written in 16 bits.

    Args:
        spec: The tensor as it is written.
        value: fp32, anywhere.
        dtype: What it becomes, the same as in `spec`.
        owner: Who may change it.
    """

    def __init__(
        self,
        spec: TensorSpec,
        value: torch.Tensor,
        dtype: torch.dtype,
        *,
        owner: int | None = None,
    ) -> None:
        self.spec = spec
        self.owner = owner
        self._value = value.detach().reshape(-1)
        self._dtype = dtype

    def view(self, begin: int, end: int) -> memoryview | None:
        """Nowhere: they are to be rounded."""
        del begin, end
        return None

    def fill(self, begin: int, end: int, *, into: memoryview) -> None:
        """Round elements; temporary memory is twice the range where they lie on a device."""
        item = self._dtype.itemsize
        piece = self._value[begin // item : end // item].cpu()
        round_into(torch.frombuffer(into, dtype=self._dtype), piece)


def round_into(target: torch.Tensor, values: torch.Tensor) -> None:
    """Round flat values on the host, of any dtype in floating point, without temporary memory.

    float64 is rounded to fp32 first, as everything in forebay's arithmetic is.
    """
    if values.dtype is torch.float64:
        values = values.float()
    native.core().convert(
        target.data_ptr(), _name(target), values.data_ptr(), _name(values), target.numel()
    )


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
