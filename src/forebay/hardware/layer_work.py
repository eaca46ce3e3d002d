"""What the operations of a transformer layer move and compute, counted one by one.

[Note: layer work] Bytes read and written for one element of an operation's input, b bytes an item,
as transformers writes the layers:

    norm         to fp32 and back where b < 4, square, mean, scale, weight
    fused norm   read, written
    rotation     two products, a half turned around, a sum
    activation   of one half, and the product with the other
    loss         logits to fp32, log-softmax
    attention    operations, not bytes; a causal kernel skips the half of the scores that is masked

Backward counts twice the bytes of forward, and 2.5 times attention's operations (Dao 2023). The
probe divides these by seconds; the planner multiplies with its own sizes: what a count leaves out
is in the rate.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "ATTENTION_BACKWARD",
    "BYTES_BACKWARD",
    "activation_bytes",
    "attention_operations",
    "fused_norm_bytes",
    "loss_bytes",
    "norm_bytes",
    "rotation_bytes",
]

BYTES_BACKWARD: Final = 2.0
ATTENTION_BACKWARD: Final = 2.5


def norm_bytes(item: int) -> int:
    """Of an RMS norm for each element."""
    converted = 2 * (item + 4) if item < 4 else 0
    return converted + 8 + 4 + 8 + 2 * item


def fused_norm_bytes(item: int) -> int:
    """Of a layer norm for each element."""
    return 2 * item


def rotation_bytes(item: int) -> int:
    """Of rotary positions for each element of queries and keys."""
    return 8 * item


def activation_bytes(item: int, *, gated: bool = True) -> int:
    """Of an activation for each element of its input."""
    return (5 if gated else 2) * item


def loss_bytes(item: int) -> int:
    """Of cross entropy for each logit."""
    return item + 4 + 8


def attention_operations(*, tokens: float, sequence: float, width: float) -> float:
    """Of the two products of causal attention; `width` of all heads together."""
    return 2.0 * tokens * sequence * width
