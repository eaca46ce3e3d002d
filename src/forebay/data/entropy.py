"""How predictable a text is, byte by byte: the yardstick for a byte-level model's loss.

A model that learned nothing but how often each byte occurs reaches the unigram entropy; one that
sees the previous byte alone reaches the order-1 conditional entropy. Going below the second takes
a model that uses more context. Both are of the text itself (no held-out estimate), so they are
the lowest values that such models can reach on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["ByteEntropy", "byte_entropy"]


class ByteEntropy(NamedTuple):
    """Entropies of a text, in nats per byte (as cross-entropy losses are)."""

    unigram: float
    order1: float


def byte_entropy(text: bytes) -> ByteEntropy:
    """Measure the unigram and the order-1 conditional entropy of a text.

    H(X) = -sum p(a) ln p(a); H(Y|X) = -sum p(ab) ln p(b|a), over the text's own counts (Shannon,
    "Prediction and entropy of printed English", 1951).

    Args:
        text: At least two bytes.

    Returns:
        Both entropies, in nats per byte.

    Raises:
        ValueError: The text has fewer than two bytes.

    Example:
        >>> entropy = byte_entropy(b"abababab")
        >>> round(entropy.unigram, 4), entropy.order1
        (0.6931, 0.0)
    """
    if len(text) < 2:
        raise ValueError(f"entropy needs at least 2 bytes of text, got {len(text)}")
    symbols = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    pairs = np.bincount(symbols[:-1] * 256 + symbols[1:], minlength=65536).reshape(256, 256)
    joint = _entropy(pairs.reshape(-1))
    # H(Y|X) = H(X, Y) - H(X), with X counted over the first bytes of the same pairs.
    order1 = joint - _entropy(pairs.sum(axis=1))
    return ByteEntropy(unigram=_entropy(np.bincount(symbols)), order1=max(0.0, order1))


def _entropy(counts: npt.NDArray[np.int64]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum()) + 0.0
