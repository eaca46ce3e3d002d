"""Micro-batches of a window, by position: what a step trains on is a function of (epoch, row).

Rows run on from one epoch into the next, so every micro-batch is full and every window has all
its micro-batches. A run that stops can go on at the position that it had reached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from forebay.data.rows import permutation

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from forebay.data.rows import Rows
    from forebay.data.tokens import TokenStore

__all__ = [
    "IGNORED",
    "BatchShape",
    "Batches",
    "MicroBatch",
    "Position",
    "RankShare",
    "Window",
    "collate",
]

# The label that torch's cross entropy leaves out.
IGNORED = -100


class BatchShape(NamedTuple):
    """How many rows a forward takes, and how many forwards an update."""

    rows: int
    accumulation: int


class RankShare(NamedTuple):
    """Which of the ranks that train together this one is."""

    rank: int = 0
    size: int = 1


class Position(NamedTuple):
    """The next row to train on: `row` rows of the epoch's order are done."""

    epoch: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Tensors of one forward, on the host.

    Attributes:
        input_ids: int64 [rows, length].
        attention_mask: int64 [rows, length], 0 over padding; None without padding (models then
            need not look whether there is any, which on a GPU would wait for the device).
        labels: int64 [rows, length], `IGNORED` where nothing is learned. Not shifted:
            position t is the label of the prediction made at t - 1.
        tokens: How many tokens are not padding.
        label_tokens: How many labels are predicted: those from position 1 on.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    labels: torch.Tensor
    tokens: int
    label_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The micro-batches between two updates.

    Attributes:
        micro_batches: In order; those of one rank.
        label_tokens: Of all of them, on all ranks: what a mean over the window divides by.
        tokens: Likewise, padding left out.
        following: Where the next window begins.
    """

    micro_batches: tuple[MicroBatch, ...]
    label_tokens: int
    tokens: int
    following: Position


class Batches:
    """Windows of a data set, shuffled anew each epoch.

    Args:
        store: The tokens.
        rows: The rows to train on.
        shape: Rows per micro-batch and micro-batches per window.
        seed: Chooses the order.
        pad_id: Fills rows.
        share: Which of every micro-batch's rows are this rank's; all ranks get equally many.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        rows: Rows,
        shape: BatchShape,
        seed: int,
        pad_id: int,
        share: RankShare = RankShare(),  # noqa: B008 - immutable
    ) -> None:
        self._store = store
        self._rows = rows
        self._seed = seed
        self._pad_id = pad_id
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None
        self.shape = shape
        self._share = share

    @property
    def num_rows(self) -> int:
        """Rows in an epoch."""
        return len(self._rows)

    @property
    def rows_at_once(self) -> int:
        """Rows of a micro-batch, those of all ranks."""
        return self.shape.rows * self._share.size

    def windows_in(self, epochs: float) -> int:
        """How many windows it takes to see every row `epochs` times, rounded up."""
        rows = self.rows_at_once * self.shape.accumulation
        return max(1, math.ceil(epochs * self.num_rows / rows))

    def window(self, position: Position) -> Window:
        """Returns the window that begins at a position."""
        micro_batches, label_tokens, tokens = [], 0, 0
        mine = slice(self._share.rank * self.shape.rows, (self._share.rank + 1) * self.shape.rows)
        for _ in range(self.shape.accumulation):
            indices, position = self._next(position)
            everybodys = self._rows.take(indices)
            label_tokens += int(everybodys.label_tokens.sum())
            tokens += int((everybodys.stops - everybodys.starts).sum())
            micro_batches.append(
                collate(self._store, self._rows.take(indices[mine]), pad_id=self._pad_id)
            )
        return Window(
            micro_batches=tuple(micro_batches),
            label_tokens=label_tokens,
            tokens=tokens,
            following=position,
        )

    def in_order(self) -> Iterator[tuple[MicroBatch, bool]]:
        """Yields every row once, unshuffled, for evaluation; the last batch may be smaller.

        Ranks take batches in turn. All yield equally many, so some repeat their last; the flag
        says whether a batch counts.
        """
        firsts = list(range(0, self.num_rows, self.shape.rows))
        for turn in range(0, len(firsts), self._share.size):
            number = turn + self._share.rank
            first = firsts[min(number, len(firsts) - 1)]
            last = min(first + self.shape.rows, self.num_rows)
            rows = self._rows.take(np.arange(first, last, dtype=np.int64))
            yield collate(self._store, rows, pad_id=self._pad_id), number < len(firsts)

    def _next(self, position: Position) -> tuple[npt.NDArray[np.int64], Position]:
        """Takes the rows of all ranks' micro-batches, running on into the next epochs."""
        taken: list[npt.NDArray[np.int64]] = []
        missing = self.rows_at_once
        while missing:
            piece = self._order_of(position.epoch)[position.row : position.row + missing]
            taken.append(piece)
            missing -= len(piece)
            position = Position(position.epoch, position.row + len(piece))
            if position.row >= self.num_rows:
                position = Position(position.epoch + 1, 0)
        return np.concatenate(taken), position

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, permutation(self.num_rows, seed=self._seed, stream=epoch)
        return self._order[1]


def collate(store: TokenStore, rows: Rows, *, pad_id: int) -> MicroBatch:
    """Copy rows into tensors, padded on the right to the longest.

    Args:
        store: The tokens.
        rows: Which stretches of it, at least one.
        pad_id: Fills the rest.

    Returns:
        The micro-batch.
    """
    lengths = (rows.stops - rows.starts).tolist()
    shape = len(rows), max(lengths)
    ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.int64)
    for row, (start, stop) in enumerate(zip(rows.starts, rows.stops, strict=True)):
        length = lengths[row]
        ids[row, :length] = store.ids[start:stop]
        labels[row, :length] = np.where(store.learned[start:stop], ids[row, :length], IGNORED)
        mask[row, :length] = 1
    return MicroBatch(
        input_ids=torch.from_numpy(ids),
        attention_mask=None if min(lengths) == max(lengths) else torch.from_numpy(mask),
        labels=torch.from_numpy(labels),
        tokens=sum(lengths),
        label_tokens=int(rows.label_tokens.sum()),
    )
