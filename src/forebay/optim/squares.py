"""Sum of squares by a fixed tree, so that a norm does not depend on who computes it.

The squares are doubles (exact for every float32, bfloat16 and float16 value: 48 bits fit 53).
They are padded with zeros to blocks of 4096, and a block is summed by halving: `x[i] + x[i+2048]`
for 2048 sums, then 1024, down to one. The block sums form a list that is summed in the same way,
until one value is left. The result is the same for any thread count, vector width or device. NaN
and infinity propagate, so one `isfinite` of the result tells whether every element was finite.
"""

from __future__ import annotations

import torch

__all__ = ["BLOCK", "row_sums", "square_blocks", "square_sum", "tree_sum"]

BLOCK = 4096

# Blocks handled at once: 1024 * 4096 doubles are 32 MiB of temporary memory.
_BLOCKS_AT_ONCE = 1024


def square_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum of the squares of all elements.

    Args:
        values: float32, bfloat16 or float16, any shape, CPU or CUDA. Not changed.

    Returns:
        A 0-dim float64 tensor on the device of `values`; nothing waits for the device.
    """
    return tree_sum(square_blocks(values))


def square_blocks(values: torch.Tensor) -> torch.Tensor:
    """The lowest sums of the tree: float64 [blocks] on the device of `values`."""
    flat = values.detach().reshape(-1)
    sums = [flat.new_zeros(0, dtype=torch.float64)]
    for start in range(0, flat.numel(), _BLOCKS_AT_ONCE * BLOCK):
        doubles = flat[start : start + _BLOCKS_AT_ONCE * BLOCK].to(torch.float64)
        padded = _padded((doubles * doubles)[None], -(-doubles.numel() // BLOCK) * BLOCK)
        sums.append(row_sums(padded.view(-1, BLOCK)))
    return torch.cat(sums)


def tree_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum of a list of float64 by the same tree; an empty list gives 0, a single value itself.

    Args:
        values: One-dimensional float64.
    """
    return row_sums(values[None]).reshape(())


def row_sums(rows: torch.Tensor) -> torch.Tensor:
    """`tree_sum` of each row of float64 [lists, values]: float64 [lists].

    Zeros behind a list change nothing, so that shorter ones may share a table with longer ones.
    """
    lists, width = rows.shape
    while width > BLOCK:
        blocks = -(-width // BLOCK)
        rows = _halved(_padded(rows, blocks * BLOCK).view(-1, BLOCK)).view(lists, blocks)
        width = blocks
    return _halved(_padded(rows, 1 << (width - 1).bit_length() if width else 1))


def _halved(rows: torch.Tensor) -> torch.Tensor:
    """Sums of rows whose length is a power of two."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def _padded(rows: torch.Tensor, width: int) -> torch.Tensor:
    if rows.shape[1] == width:
        return rows
    padded = rows.new_zeros(rows.shape[0], width)
    padded[:, : rows.shape[1]] = rows
    return padded
