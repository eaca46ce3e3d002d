"""Weights whose slices are on several ranks, brought to rank 0 piece by piece while it writes them.

Every rank makes the same gathers in the same order, so those that write nothing follow the same
list. No rank ever holds more of another's weights than a piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay.checkpoint.header import DTYPES
from forebay.checkpoint.manifest import BLOCK_BYTES
from forebay.checkpoint.sources import round_into

if TYPE_CHECKING:
    from forebay.checkpoint.header import TensorSpec
    from forebay.engine.engine import Engine
    from forebay.engine.record import ParamRecord

__all__ = ["GatheredWeight", "Gathers"]


class Gathers:
    """The gathers of one file, in order.

    Args:
        engine: Whose weights they are; every rank makes one at the same point.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turns: list[tuple[ParamRecord, int, int]] = []
        self._done = 0

    def source(self, record: ParamRecord, spec: TensorSpec) -> GatheredWeight:
        """A tensor of the file, the next one in its order."""
        item = DTYPES[spec.dtype].itemsize
        per_block = BLOCK_BYTES // item
        for first in range(0, spec.elements, per_block):
            self._turns.append((record, first, min(first + per_block, spec.elements)))
        return GatheredWeight(spec, record, gathers=self)

    def next_of(self, record: ParamRecord, first: int, last: int) -> torch.Tensor:
        """Elements `[first, last)` of a weight, flat, on the host; the next in the list."""
        turn = self._turns[self._done]
        assert turn == (record, first, last), (record.label, first, last)
        self._done += 1
        return _piece(self._engine, record, first, last)

    def follow(self) -> None:
        """Make the gathers that are left for those who need them."""
        while self._done < len(self._turns):
            self.next_of(*self._turns[self._done])


class GatheredWeight:
    """A `checkpoint.sources.Source`, filled by one thread and in order.

    Args:
        spec: The tensor as it is written.
        record: The parameter.
        gathers: The list that this is a part of.
    """

    owner: int | None = None

    def __init__(self, spec: TensorSpec, record: ParamRecord, *, gathers: Gathers) -> None:
        self.spec = spec
        self._record = record
        self._gathers = gathers

    def view(self, begin: int, end: int) -> memoryview | None:
        """Nowhere: its slices are on several ranks."""
        del begin, end
        return None

    def fill(self, begin: int, end: int, *, into: memoryview) -> None:
        """Gather and round."""
        dtype = DTYPES[self.spec.dtype]
        first, last = begin // dtype.itemsize, end // dtype.itemsize
        value = self._gathers.next_of(self._record, first, last)
        target = torch.frombuffer(into, dtype=dtype)
        if value.dtype is dtype:
            target.copy_(value)
        else:
            round_into(target, value)


def _piece(engine: Engine, record: ParamRecord, first: int, last: int) -> torch.Tensor:
    part, slot = record.part, record.slot
    spans = []
    for rank in range(engine.placement.sharding.size):
        held = part.layout.shard(rank).segment(slot)
        begin = min(max(first, held.start), last)
        spans.append((begin, max(begin, min(last, held.start + held.elements))))
    longest = max(end - begin for begin, end in spans)
    begin, end = spans[engine.placement.sharding.rank]
    own = torch.zeros(longest, dtype=part.dtype, device=part.device)
    at = record.segment.offset + begin - record.segment.start
    if begin < end:
        own[: end - begin] = part.read_own_weights(at, at + end - begin)
    rows = engine.ranks.gather(own)
    pieces = [row[: e - b] for row, (b, e) in zip(rows, spans, strict=True)]
    return torch.cat(pieces).cpu()
