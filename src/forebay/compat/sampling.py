"""Which samples a rank trains on: all ranks get equally many, and no two the same in an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, Sampler

from forebay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized

__all__ = ["RankSampler", "RankStream"]


class RankSampler(Sampler[int]):
    """Every `size`-th sample of an order that all ranks agree on, a new one each epoch.

    What is left over at an epoch's end is filled up from its beginning, as by torch's
    DistributedSampler, or left out with `drop_last`. Epochs count by themselves.

    Args:
        data: Anything with a length.
        rank: This rank.
        size: Number of ranks.
        seed: The same on every rank; None does not shuffle.
        drop_last: Whether samples that do not make a whole round are left out.

    Raises:
        ConfigError: There are fewer samples than ranks, and none may be repeated.
    """

    def __init__(
        self, data: Sized, *, rank: int, size: int, seed: int | None, drop_last: bool = False
    ) -> None:
        self._count = len(data)
        self._rank = rank
        self._size = size
        self._seed = seed
        self._epoch = 0
        self._rounds = self._count // size if drop_last else -(-self._count // size)
        if not self._rounds:
            raise ConfigError(
                f"a dataset of {self._count} samples is too small for {size} ranks",
                hint="start fewer ranks, or leave dataloader_drop_last out",
            )

    def __len__(self) -> int:
        return self._rounds

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._count))
        if self._seed is not None:
            generator = torch.Generator().manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._count, generator=generator).tolist()
        self._epoch += 1
        for turn in range(self._rounds):
            yield order[(turn * self._size + self._rank) % self._count]


class RankStream(IterableDataset[Any]):
    """Every `size`-th item of a stream; an incomplete last round is left out.

    Args:
        data: The stream, the same on every rank.
        rank: This rank.
        size: Number of ranks.
    """

    def __init__(self, data: IterableDataset[Any], *, rank: int, size: int) -> None:
        self._data = data
        self._rank = rank
        self._size = size

    def __iter__(self) -> Iterator[Any]:
        mine = None
        for number, item in enumerate(self._data):
            turn = number % self._size
            if turn == self._rank:
                mine = item
            if turn == self._size - 1:
                yield mine
