"""The order in which a forward uses units, of which some are frozen and wait for no update."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["reordered"]


def reordered(order: Sequence[int], trained: Sequence[int]) -> tuple[int, ...]:
    """The same units with those that are trained in the order in which they ran.

    A frozen unit stays behind the one that it was behind.

    Args:
        order: All units.
        trained: Those of them that are trained, in their new order.

    Example:
        >>> reordered([9, 0, 8, 1, 2], [2, 0, 1])
        (9, 2, 0, 8, 1)
    """
    known = set(trained)
    behind: dict[int | None, list[int]] = {None: []}
    last = None
    for unit in order:
        if unit in known:
            last = unit
            behind[last] = []
        else:
            behind[last].append(unit)
    return (*behind[None], *(one for unit in trained for one in (unit, *behind[unit])))
