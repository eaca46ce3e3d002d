"""A slow group on purpose: collectives take the time that a link of some bandwidth would.

A missing overlap then shows as seconds, and a missing wait as wrong bits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from forebay.comm.group import Group
    from forebay.comm.talk import Talk

__all__ = ["SlowGroup"]


class SlowGroup:
    """Another group behind a slow link.

    Args:
        inner: Carries the bytes.
        seconds: What each exchange of data takes longer; handshakes take no longer.

    Attributes:
        slept_seconds: All delays so far.
    """

    def __init__(self, inner: Group, *, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds
        self.slept_seconds = 0.0
        self.rank, self.size = inner.rank, inner.size
        self.local_rank, self.local_size = inner.local_rank, inner.local_size

    def _delay(self) -> None:
        time.sleep(self._seconds)
        self.slept_seconds += self._seconds

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """See `Group`; late."""
        self._inner.all_to_all(received, sent)
        self._delay()

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """See `Group`; late."""
        self._inner.all_gather(received, sent)
        self._delay()

    def tell(self, values: torch.Tensor, *, what: str) -> torch.Tensor:
        """See `Group`."""
        return self._inner.tell(values, what=what)

    def compare(self, text: str, *, what: str) -> list[str]:
        """See `Group`."""
        return self._inner.compare(text, what=what)

    def talk(self, name: str) -> Talk:
        """See `Group`."""
        return self._inner.talk(name)

    def check(self) -> None:
        """See `Group`."""
        self._inner.check()

    def fail(self, reason: str) -> None:
        """See `Group`."""
        self._inner.fail(reason)

    def close(self) -> None:
        """See `Group`."""
        self._inner.close()
