"""Columns of a parameter: how large their gradients are, and the chosen ones taken out and put in.

A parameter of shape `[rows, ...]` is a matrix of `rows` times `columns` elements, `columns` being
the product of all dimensions but the first; element `e` lies in column `e % columns`. A parameter
with fewer than two dimensions has no columns: it is taken as a whole. What is looked at may be a
slice of the flat parameter, which begins and ends in the middle of a row.

[Note: column sums] The sum of a column's squares must not depend on the device. The squares are
doubles (exact). Rows are cut into blocks of 256, counted from the slice's first row; missing
elements are zeros. A block is summed by halving (`x[i] + x[i + 128]` first), and the blocks' sums
are added in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.model.column_slice import ColumnSlice

__all__ = ["Columns", "column_squares", "largest_columns"]

_BLOCK_ROWS = 256


def column_squares(values: torch.Tensor, where: ColumnSlice) -> torch.Tensor:
    """The sum of squares of each column; see [Note: column sums].

    Args:
        values: float32, bfloat16 or float16 of `where.elements`, contiguous, CPU or CUDA.
        where: The slice, which has columns.

    Returns:
        float64 [columns] on the device of `values`; nothing waits for the device.
    """
    flat, columns = values.detach().reshape(-1), where.columns
    sums = torch.zeros(columns, dtype=torch.float64, device=flat.device)
    size, lead = _BLOCK_ROWS * columns, where.start % columns
    for first in range(0, lead + where.elements, size):
        begin, end = max(0, first - lead), min(where.elements, first + size - lead)
        block = torch.zeros(size, dtype=torch.float64, device=flat.device)
        block[begin + lead - first : end + lead - first] = flat[begin:end]
        tree = (block * block).view(_BLOCK_ROWS, columns)
        while tree.shape[0] > 1:
            half = tree.shape[0] // 2
            tree = tree[:half] + tree[half:]
        sums = sums + tree[0]
    return sums


def largest_columns(squares: torch.Tensor, count: int) -> torch.Tensor:
    """The columns with the largest sums, ascending; of equal ones the first.

    Args:
        squares: float64 [columns].
        count: How many.

    Returns:
        int64 [count] on the host; waits for the device.
    """
    order = torch.sort(squares.cpu(), descending=True, stable=True).indices
    return torch.sort(order[:count]).values


class Columns:
    """Chosen columns of a slice: a compact copy of their elements, and back.

    The compact order is that of the slice: what is chosen of the first row, then of the others.

    Args:
        where: The slice.
        chosen: The columns, int64, ascending; None for all elements.

    Attributes:
        elements: Length of a compact copy.
    """

    def __init__(self, where: ColumnSlice, chosen: torch.Tensor | None) -> None:
        self.where = where
        self.chosen = chosen
        # (first element, rows, width of a row, columns within it) of up to three ranges
        self._ranges: list[tuple[int, int, int, torch.Tensor]] = []
        self.elements = where.elements
        if chosen is not None:
            self._ranges = list(_ranges(where, chosen))
            self.elements = sum(rows * len(inside) for _, rows, _, inside in self._ranges)
        self._on: dict[torch.device, list[torch.Tensor]] = {}

    @property
    def are_all(self) -> bool:
        """Whether no element of the slice is outside them."""
        return self.elements == self.where.elements

    def pick(self, flat: torch.Tensor) -> torch.Tensor:
        """A compact copy of their elements.

        Args:
            flat: [elements of the slice], on any device.
        """
        if self.chosen is None:
            return flat.clone()
        pieces = [
            _matrix(flat, begin, rows, width).index_select(1, inside).reshape(-1)
            for (begin, rows, width, _), inside in zip(
                self._ranges, self._indices(flat.device), strict=True
            )
        ]
        return torch.cat(pieces) if pieces else flat.new_empty(0)

    def put(self, flat: torch.Tensor, compact: torch.Tensor) -> None:
        """Write a compact copy back over their elements.

        Args:
            flat: [elements of the slice]; changed.
            compact: As `pick` returned it, on the same device.
        """
        if self.chosen is None:
            flat.copy_(compact)
            return
        at = 0
        for (begin, rows, width, _), inside in zip(
            self._ranges, self._indices(flat.device), strict=True
        ):
            count = rows * len(inside)
            piece = compact[at : at + count].view(rows, len(inside))
            _matrix(flat, begin, rows, width).index_copy_(1, inside, piece)
            at += count

    def _indices(self, device: torch.device) -> list[torch.Tensor]:
        if device not in self._on:
            self._on[device] = [inside.to(device) for _, _, _, inside in self._ranges]
        return self._on[device]


def _matrix(flat: torch.Tensor, begin: int, rows: int, width: int) -> torch.Tensor:
    return flat[begin : begin + rows * width].view(rows, width)


def _ranges(
    where: ColumnSlice, chosen: torch.Tensor
) -> Iterator[tuple[int, int, int, torch.Tensor]]:
    """The rest of a row, whole rows, the beginning of a row; none of them empty."""
    columns, first = where.columns, where.start % where.columns
    head = min(where.elements, (columns - first) % columns)
    rows = (where.elements - head) // columns
    tail = where.elements - head - rows * columns
    inside_head = chosen[(chosen >= first) & (chosen < first + head)] - first
    inside_tail = chosen[chosen < tail]
    for begin, count, width, inside in (
        (0, 1, head, inside_head),
        (head, rows, columns, chosen),
        (head + rows * columns, 1, tail, inside_tail),
    ):
        if count * width and len(inside):
            yield begin, count, width, inside
