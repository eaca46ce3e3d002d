"""Squares of parameters that lie on several ranks, from sums of blocks that each rank has.

[Note: groups] The tree of `forebay.optim.squares` adds up the sums of 4,096 blocks in a group. A
group that one rank has whole travels as its sum; of one that slices cut, each rank sends what it
has of the blocks. So most of the work is done where the blocks are, and the bits are those of the
whole tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from forebay.optim.squares import BLOCK, row_sums

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["PartBlocks", "SharedSquares"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartBlocks:
    """Blocks of one part.

    Attributes:
        key: Names it among all parts.
        each: Blocks of each rank's slice; slices follow each other in the order of the sharers.
        spans: [first, last) blocks of each parameter, by its index.
    """

    key: tuple[int, int]
    each: int
    spans: Mapping[int, tuple[int, int]]


class _Piece(NamedTuple):
    """What one rank has of a group."""

    group: int
    within: int  # first block in the group
    key: tuple[int, int]
    at: int  # first block in the rank's slice
    blocks: int


class SharedSquares:
    """Puts them together, alike on every rank; see [Note: groups].

    Args:
        parts: All parts, in an order that is the same on every rank.
        sharers: How many ranks have slices of them.
        shard: This rank among them.

    Attributes:
        length: Numbers that each rank tells, as many on each.
    """

    def __init__(self, parts: Sequence[PartBlocks], *, sharers: int, shard: int) -> None:
        self._params: list[int] = []
        sizes: list[int] = []  # blocks of each group
        columns: list[tuple[int, int]] = []  # parameter and place of each group
        pieces: list[list[_Piece]] = [[] for _ in range(sharers)]
        for part in parts:
            for index, (first, last) in part.spans.items():
                for place, begin in enumerate(range(first, last, BLOCK)):
                    end = min(begin + BLOCK, last)
                    for rank, piece in _pieces(part, begin, end, group=len(sizes)):
                        pieces[rank].append(piece)
                    sizes.append(end - begin)
                    columns.append((len(self._params), place))
                self._params.append(index)
        width = 1 + max((place for _, place in columns), default=0)
        self._table = len(self._params), width
        self._cells = torch.tensor(
            [row * width + place for row, place in columns], dtype=torch.int64
        )
        done = [[p for p in of if p.blocks == sizes[p.group]] for of in pieces]
        cut = [[p for p in of if p.blocks < sizes[p.group]] for of in pieces]
        self._own_done, self._own_cut = done[shard], cut[shard]
        told = [len(d) + sum(p.blocks for p in c) for d, c in zip(done, cut, strict=True)]
        self.length = max(told, default=0)
        self._done_groups = torch.tensor([p.group for of in done for p in of], dtype=torch.int64)
        self._done_told = torch.tensor(
            [rank * self.length + n for rank, of in enumerate(done) for n in range(len(of))],
            dtype=torch.int64,
        )
        rows = {group: n for n, group in enumerate(sorted({p.group for of in cut for p in of}))}
        self._cut_groups = torch.tensor(list(rows), dtype=torch.int64)
        self._cut_cells = _joined(
            torch.arange(p.blocks) + rows[p.group] * BLOCK + p.within for of in cut for p in of
        )
        self._cut_told = _joined(
            torch.arange(sum(p.blocks for p in of)) + rank * self.length + len(done[rank])
            for rank, of in enumerate(cut)
        )
        self._groups = len(sizes)

    def told(self, blocks: Mapping[tuple[int, int], torch.Tensor]) -> torch.Tensor:
        """What this rank tells the others: float64 [length].

        Args:
            blocks: Sums of the squares of its blocks, by part; zeros where one is missing.
        """
        groups = torch.zeros(len(self._own_done), BLOCK, dtype=torch.float64)
        found = torch.zeros(self.length, dtype=torch.float64)
        for row, piece in zip(groups, self._own_done, strict=True):
            if piece.key in blocks:
                row[: piece.blocks] = blocks[piece.key][piece.at : piece.at + piece.blocks]
        found[: len(groups)] = row_sums(groups)
        end = len(groups)
        for piece in self._own_cut:
            begin, end = end, end + piece.blocks
            if piece.key in blocks:
                found[begin:end] = blocks[piece.key][piece.at : piece.at + piece.blocks]
        return found

    def sums(self, rows: torch.Tensor) -> dict[int, float]:
        """The sum of each parameter's squares, by its index.

        Args:
            rows: What each sharer has told: float64 [sharers, length].
        """
        flat = rows.reshape(-1)
        groups = torch.zeros(self._groups, dtype=torch.float64)
        groups[self._done_groups] = flat[self._done_told]
        cut = torch.zeros(len(self._cut_groups), BLOCK, dtype=torch.float64)
        cut.view(-1)[self._cut_cells] = flat[self._cut_told]
        groups[self._cut_groups] = row_sums(cut)
        table = torch.zeros(self._table, dtype=torch.float64)
        table.view(-1)[self._cells] = groups
        return dict(zip(self._params, row_sums(table).tolist(), strict=True))


def _pieces(part: PartBlocks, begin: int, end: int, *, group: int) -> Iterator[tuple[int, _Piece]]:
    """What each rank has of blocks [begin, end), which are a group."""
    for rank in range(begin // part.each, (end - 1) // part.each + 1):
        first = max(begin, rank * part.each)
        last = min(end, (rank + 1) * part.each)
        yield (
            rank,
            _Piece(
                group=group,
                within=first - begin,
                key=part.key,
                at=first - rank * part.each,
                blocks=last - first,
            ),
        )


def _joined(lists: Iterator[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *lists])
