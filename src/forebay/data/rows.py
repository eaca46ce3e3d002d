"""Which tokens stand together in a training row, and which rows are held out.

A row is a stretch of the token store, so a plan is two numbers per row. Packing lets a row hold
several documents; attention then crosses their borders (as in ordinary pretraining), the loss
does not: the first token of a document is never a label.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from forebay.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

    from forebay.data.tokens import TokenStore

__all__ = ["Layout", "Overlong", "Rows", "Split", "permutation", "plan_rows", "split_rows"]

# Which use a permutation is for; epochs count up from 0 and never reach it.
_HELD_OUT_STREAM: Final = (1 << 64) - 1


class Layout(Enum):
    """How documents become rows."""

    CUT = "cut"
    """One stream, cut every sequence length: for text, where any token may begin a row."""
    PACK = "pack"
    """Whole documents side by side while they fit, in order; the rest of the row is padding."""
    PAD = "pad"
    """One document per row, padded to the longest of its micro-batch."""


class Overlong(Enum):
    """What happens to a document longer than a row."""

    REFUSE = "refuse"
    TRUNCATE = "truncate"
    """Its end is cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Stretches of a token store.

    Attributes:
        starts: int64, the first token of each row.
        stops: int64, one past the last.
        label_tokens: int64, how many tokens of each row are predicted and learned. Never 0.
        num_truncated: Documents whose end was cut off.
        num_dropped: Rows left out because no label was left in them.
    """

    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    label_tokens: npt.NDArray[np.int64]
    num_truncated: int = 0
    num_dropped: int = 0

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, indices: npt.NDArray[np.int64]) -> Rows:
        """Returns some of the rows, in the order of the indices."""
        return Rows(
            starts=self.starts[indices],
            stops=self.stops[indices],
            label_tokens=self.label_tokens[indices],
        )


class Split(NamedTuple):
    """Rows to learn from and rows to evaluate on."""

    train: Rows
    held_out: Rows


def plan_rows(
    store: TokenStore,
    *,
    layout: Layout,
    length: int,
    overlong: Overlong = Overlong.REFUSE,
    context: int | None = None,
) -> Rows:
    """Cut a token store into rows of at most `length` tokens.

    Args:
        store: The tokens.
        layout: How documents become rows.
        length: Most tokens in a row.
        overlong: What to do with documents that do not fit; `Layout.CUT` has none.
        context: The longest row that the model can read, where it has a bound; for the hint.

    Returns:
        The rows, in the order of the store.

    Raises:
        ConfigError: Documents are too long and may not be truncated, or no row is left.
    """
    starts, stops = store.starts[:-1], store.starts[1:]
    truncated = 0
    if layout is Layout.CUT:
        starts = np.arange(0, store.num_tokens, length, dtype=np.int64)
        stops = np.minimum(starts + length, store.num_tokens)
    else:
        lengths = stops - starts
        truncated = int((lengths > length).sum())
        if truncated and overlong is Overlong.REFUSE:
            raise _too_long(truncated, lengths=lengths, length=length, context=context)
        stops = np.minimum(stops, starts + length)
        if layout is Layout.PACK:
            starts, stops = _side_by_side(starts, stops, length=length)
    # The first token of a row has nothing before it to be predicted from.
    labels = np.array(
        [np.count_nonzero(store.learned[a + 1 : b]) for a, b in zip(starts, stops, strict=True)],
        dtype=np.int64,
    )
    kept = labels > 0
    if not kept.any():
        raise ConfigError(
            f"nothing to learn: {store.num_documents} samples with {store.num_tokens} tokens give "
            f"{len(labels)} rows without a label",
            hint="check that the data has text or answers, and raise --sequence-length",
        )
    return Rows(
        starts=starts[kept],
        stops=stops[kept],
        label_tokens=labels[kept],
        num_truncated=truncated,
        num_dropped=int((~kept).sum()),
    )


def _too_long(
    count: int, *, lengths: npt.NDArray[np.int64], length: int, context: int | None
) -> ConfigError:
    longest = int(lengths.max())
    hint = f"--truncate cuts their ends off; --sequence-length {longest} takes them whole"
    if context is not None and longest > context:
        hint = f"--truncate cuts their ends off; the model's context is {context} tokens"
    return ConfigError(
        f"{count} of {len(lengths)} samples are longer than the sequence length of {length} "
        f"tokens (the longest has {longest})",
        hint=hint,
    )


def _side_by_side(
    starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64], *, length: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Joins neighbours while they fit. A truncated document ends its row: a gap follows it."""
    row_starts: list[int] = []
    row_stops: list[int] = []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        if row_stops and row_stops[-1] == start and stop - row_starts[-1] <= length:
            row_stops[-1] = stop
        else:
            row_starts.append(start)
            row_stops.append(stop)
    return np.array(row_starts, dtype=np.int64), np.array(row_stops, dtype=np.int64)


def split_rows(rows: Rows, *, fraction: float, seed: int) -> Split:
    """Hold rows out for evaluation; the same ones for the same seed, whatever else changes.

    Args:
        rows: All rows.
        fraction: Share to hold out, from 0 (none) to below 1; at least one row if above 0.
        seed: Chooses them.

    Returns:
        Both parts, each in the order of `rows`.

    Raises:
        ConfigError: The rows cannot be shared out.
    """
    count = round(fraction * len(rows))
    if fraction > 0:
        count = max(1, count)
        if count >= len(rows):
            raise ConfigError(
                f"cannot hold out {count} of {len(rows)} rows: none is left to train on",
                hint="give more data, a shorter --sequence-length, or --eval-fraction 0",
            )
    order = permutation(len(rows), seed=seed, stream=_HELD_OUT_STREAM)
    return Split(
        train=rows.take(np.sort(order[count:])), held_out=rows.take(np.sort(order[:count]))
    )


def permutation(count: int, *, seed: int, stream: int) -> npt.NDArray[np.int64]:
    """Order `count` things by a keyed hash of their number.

    A hash and not a library's generator: the order must be the same on every machine and with
    every version, because a position in it is how a run goes on. splitmix64 (Steele, Lea, Flood,
    "Fast splittable pseudorandom number generators", 2014).

    Args:
        count: How many things.
        seed: The run's seed, any integer.
        stream: Which of the run's orders: the epoch, counted from 0.

    Returns:
        Every number from 0 to count - 1 once.
    """
    key = _mix(_mix(np.array([seed & _MASK], dtype=np.uint64)) ^ np.uint64(stream & _MASK))
    keys = _mix(_mix(np.arange(count, dtype=np.uint64)) ^ key)
    return np.argsort(keys, kind="stable").astype(np.int64)


_MASK: Final = (1 << 64) - 1


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One step of splitmix64, on 64-bit integers that wrap around."""
    with np.errstate(over="ignore"):
        mixed = values + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
