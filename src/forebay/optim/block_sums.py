"""Sums of squares of blocks: what a rank knows of a norm before the ranks put them together.

Where shards begin at multiples of `BLOCK` in every parameter, each block of the tree of
`forebay.optim.squares` lies on one rank. So the ranks exchange the tree's lowest sums, and the
norm does not depend on where shards are cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from forebay.optim.device_math import device_square_blocks
from forebay.optim.squares import BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BlockSums"]

Key = TypeVar("Key")


class BlockSums(Generic[Key]):
    """Sums begun and not read yet, by key.

    Args:
        core: The native core.
        pool: Its worker pool.
    """

    def __init__(self, core: Any, pool: Any) -> None:
        self._core = core
        self._pool = pool
        self._begun: dict[Key, Any] = {}
        # What the pool still reads: values that have left must not stay until the sums are read.
        self._reading: list[tuple[Any, torch.Tensor]] = []

    def begin(self, key: Key, values: torch.Tensor) -> None:
        """Sum the squares of the blocks of a flat fp32 tensor; replaces what the key had.

        On a device in the order of its current stream; on the host in the pool.
        """
        if values.device.type == "cpu":
            spans = [
                (values.data_ptr() + 4 * start, min(BLOCK, values.numel() - start))
                for start in range(0, values.numel(), BLOCK)
            ]
            begun = self._pool.square_sums(spans, "float32", [])
            self._reading = [entry for entry in self._reading if not entry[0].done]
            self._reading.append((begun, values))
            self._begun[key] = begun
        else:
            self._begun[key] = device_square_blocks(values)

    def begin_at(self, key: Key, address: int, elements: int, *, after: Sequence[Any]) -> None:
        """The same for host memory at an address, once `after` is done."""
        spans = [
            (address + 4 * start, min(BLOCK, elements - start))
            for start in range(0, elements, BLOCK)
        ]
        self._begun[key] = self._pool.square_sums(spans, "float32", list(after))

    def read(self) -> dict[Key, torch.Tensor]:
        """Wait for all of them, in one transfer: float64 on the host."""
        there = {key: sums for key, sums in self._begun.items() if isinstance(sums, torch.Tensor)}
        sums = {}
        if there:
            values = torch.cat(list(there.values())).cpu()
            sums = dict(zip(there, values.split([len(s) for s in there.values()]), strict=True))
        for key, begun in self._begun.items():
            if key not in there:
                begun.wait()
                sums[key] = torch.tensor(begun.results(), dtype=torch.float64)
        for begun, _ in self._reading:
            begun.wait()
        self._reading.clear()
        self._begun.clear()
        return sums

    def drop(self) -> None:
        """Forget all of them."""
        self.read()
