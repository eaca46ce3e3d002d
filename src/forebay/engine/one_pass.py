"""Forwards that are one pass together: micro-batches that take turns."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["OnePass"]


class OnePass:
    """Whether forwards are passes of their own, or share one.

    Attributes:
        is_shared: They share one now.
        has_begun: And one of those has begun.
    """

    def __init__(self) -> None:
        self.is_shared = False
        self.has_begun = False

    @contextlib.contextmanager
    def by_turns(self) -> Iterator[None]:
        """Inside it, forwards share one pass."""
        self.is_shared, self.has_begun = True, False
        try:
            yield
        finally:
            self.is_shared = self.has_begun = False

    def begins(self) -> bool:
        """A forward begins: whether a pass begins with it."""
        first = not self.has_begun
        self.has_begun = self.is_shared
        return first
