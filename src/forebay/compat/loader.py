"""Loaders over a user's dataset: what `initialize(training_data=...)` and `deepspeed_io` make.

They are plain `torch.utils.data.DataLoader`s of one micro-batch per item.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from forebay.compat.flags import check_flags
from forebay.compat.sampling import RankSampler, RankStream
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from forebay.comm.group import Group

__all__ = ["ROUTES", "RepeatingLoader", "check_dataset", "make_loader", "samples_in"]

# DeepSpeed's words; only the first shuffles.
ROUTES = ("train", "eval", "predict")


def check_dataset(data: Any, *, name: str) -> None:
    """Refuse what is no dataset.

    Raises:
        ConfigError: It is neither an `IterableDataset` nor has items and a length.
    """
    if isinstance(data, DataLoader):
        raise ConfigError(
            f"{name} is a DataLoader, and a loader is made from it",
            hint="pass the dataset (loader.dataset), or go through your own loader",
        )
    if isinstance(data, IterableDataset):
        return
    if isinstance(data, str) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise ConfigError(
            f"{name} is of type {type(data).__name__}, which is no dataset",
            hint="pass a torch.utils.data.Dataset, an IterableDataset, or a list of samples",
        )


def samples_in(data: Any) -> int | None:
    """How many samples a dataset that was checked has; None where nobody can tell."""
    if data is None or isinstance(data, IterableDataset):
        return None
    return len(data)


def make_loader(
    data: Any,
    *,
    batch_size: int,
    drop_last: bool,
    collate_fn: Callable[..., Any] | None = None,
    route: str = "train",
    sampler: Any = None,
    workers: int = 0,
    pin_memory: bool = False,
    group: Group | None = None,
) -> DataLoader[Any]:
    """A loader of micro-batches.

    Args:
        data: The dataset.
        batch_size: Samples per forward pass.
        drop_last: Whether an incomplete last batch is left out.
        collate_fn: Samples into a batch; None stacks tensors.
        route: "train" shuffles (with torch's global generator); "eval" and "predict" do not.
        sampler: Decides the order instead.
        workers: Processes that load.
        pin_memory: Whether batches are page-locked; without a CUDA device they never are.
        group: The ranks that share the data: each gets equally many samples of its own.

    Raises:
        ConfigError: The data is no dataset, or the route is none.
    """
    check_flags("deepspeed_io", pin_memory=pin_memory)
    check_dataset(data, name="the dataset")
    if route not in ROUTES:
        raise ConfigError(f"route is {route!r}; it must be one of {', '.join(ROUTES)}")
    streams = isinstance(data, IterableDataset)
    if group is not None and sampler is None:
        if streams:
            data = RankStream(data, rank=group.rank, size=group.size)
        else:
            sampler = RankSampler(
                data,
                rank=group.rank,
                size=group.size,
                seed=torch.initial_seed() if route == "train" else None,
                drop_last=drop_last,
            )
    return DataLoader(
        data,
        batch_size=batch_size,
        shuffle=route == "train" and sampler is None and not streams,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=workers,
        pin_memory=pin_memory and torch.cuda.is_available(),
    )


class RepeatingLoader:
    """A loader that begins again when it ends.

    Args:
        loader: Anything that can be iterated more than once.

    Example:
        >>> batches = iter(RepeatingLoader([1, 2]))
        >>> [next(batches) for _ in range(5)]
        [1, 2, 1, 2, 1]
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._batches: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)
