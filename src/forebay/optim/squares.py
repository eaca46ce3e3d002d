"""Sum of squares by a fixed tree, so that a norm does not depend on who computes it.

The squares are doubles (exact for every float32, bfloat16 and float16 value: 48 bits fit 53).
They are padded with zeros to blocks of 4096, and a block is summed by halving: `x[i] + x[i+2048]`
for 2048 sums, then 1024, down to one. The block sums form a list that is summed in the same way,
until one value is left. The result is the same for any thread count, vector width or device. NaN
and infinity propagate, so one `isfinite` of the result tells whether every element was finite.
"""

from __future__ import annotations

import torch

__all__ = ["BLOCK", "square_blocks", "square_sum", "tree_sum"]

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
        sums.append(_block_sums(doubles * doubles))
    return torch.cat(sums)


def tree_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum of a list of float64 by the same tree; an empty list gives 0, a single value itself.

    Args:
        values: One-dimensional float64.
    """
    if not values.numel():
        return values.new_zeros(())
    while values.numel() > 1:
        values = _block_sums(values)
    return values.reshape(())


def _block_sums(values: torch.Tensor) -> torch.Tensor:
    blocks = -(-values.numel() // BLOCK)
    padded = values.new_zeros(blocks * BLOCK)
    padded[: values.numel()] = values
    tree = padded.view(blocks, BLOCK)
    while tree.shape[1] > 1:
        half = tree.shape[1] // 2
        tree = tree[:, :half] + tree[:, half:]
    return tree.reshape(-1)
