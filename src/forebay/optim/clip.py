"""Clipping by the global norm: from sums of squares to the one scale of an update.

Averaging over ranks, the loss scale and the clip factor are one multiplication of the gradient,
by a number that is rounded to float32 once. Nothing here touches a gradient.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from forebay.optim.rule import float32

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["global_norm", "gradient_scale", "ordered_sum"]

# torch.nn.utils.clip_grad_norm_ divides by the norm plus this.
_NORM_EPS = 1e-6


def ordered_sum(values: Iterable[float]) -> float:
    """Plain left-to-right sum of doubles.

    The built-in `sum` compensates rounding errors from Python 3.12 on, so it would make the norm
    depend on the interpreter.
    """
    total = 0.0
    for value in values:
        total += value
    return total


def global_norm(square_sums: Iterable[float], *, divisor: float = 1.0) -> float:
    """Norm of the averaged, unscaled gradient.

    Args:
        square_sums: Sum of squares of each parameter's final gradient, in parameter order, as
            `forebay.optim.squares` defines it; absent gradients have no entry.
        divisor: Loss scale times number of ranks: what the gradients are too large by.

    Returns:
        The norm; NaN or infinite when a gradient is.
    """
    return math.sqrt(ordered_sum(square_sums)) / divisor


def gradient_scale(norm: float, *, max_norm: float | None, divisor: float = 1.0) -> float:
    """What every gradient is multiplied by in the update, as a float32 value.

    Args:
        norm: The global norm, from `global_norm`.
        max_norm: Bound on the norm; None does not clip.
        divisor: Loss scale times number of ranks.

    Returns:
        `(1 / divisor) * min(1, max_norm / (norm + 1e-6))` in double precision, rounded once. A
        NaN norm gives NaN, as in torch: it must not pass as "no clipping needed".

    Example:
        >>> gradient_scale(2.0, max_norm=None, divisor=4.0)
        0.25
    """
    average = 1.0 / divisor
    if max_norm is None:
        return float32(average)
    clip = max_norm / (norm + _NORM_EPS)
    # `min(1.0, nan)` is 1.0 in Python.
    return float32(average * (clip if math.isnan(clip) else min(1.0, clip)))
