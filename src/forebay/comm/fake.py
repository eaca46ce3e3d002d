"""Groups that are slow or silent on purpose.

In `SlowGroup` a missing overlap shows as seconds, and a missing wait as wrong bits. Beside
`StillGroup`, where ranks exchange nothing, what exchanges add to a step's time shows.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from forebay.comm.group import Group
    from forebay.comm.talk import Talk

__all__ = ["SlowGroup", "StillGroup"]


class _Wrapped:
    """Another group, whatever becomes of its exchanges of data.

    Args:
        inner: The group.
    """

    def __init__(self, inner: Group) -> None:
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.local_rank, self.local_size = inner.local_rank, inner.local_size
        self.shard, self.sharers, self.copy = inner.shard, inner.sharers, inner.copy

    def connect(self) -> None:
        """See `Group`."""
        self._inner.connect()

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

    def part(self) -> None:
        """See `Group`."""
        self._inner.part()

    def close(self) -> None:
        """See `Group`."""
        self._inner.close()


class StillGroup(_Wrapped):
    """Ranks that still agree on what they do, and send no data: each gets its own back.

    For timing alone; what is trained with it is of no use.
    """

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """See `Group`."""
        received.copy_(sent)

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """See `Group`."""
        _repeat(received, sent)

    def reduce_scatter(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """See `Group`."""
        received.copy_(sent.view(len(self.sharers), -1)[self.shard])

    def gather_copies(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """See `Group`."""
        _repeat(received, sent)

    def spread_copy(self, values: torch.Tensor, *, copy: int) -> None:
        """See `Group`."""


def _repeat(received: torch.Tensor, sent: torch.Tensor) -> None:
    received.view(-1, sent.numel()).copy_(sent.view(1, -1))


class SlowGroup(_Wrapped):
    """Another group behind a slow link.

    Args:
        inner: Carries the bytes.
        seconds: What each exchange of data takes longer; handshakes take no longer.

    Attributes:
        slept_seconds: All delays so far.
    """

    def __init__(self, inner: Group, *, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds
        self.slept_seconds = 0.0

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

    def reduce_scatter(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """See `Group`; late."""
        self._inner.reduce_scatter(received, sent)
        self._delay()

    def gather_copies(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """See `Group`; late."""
        self._inner.gather_copies(received, sent)
        self._delay()

    def spread_copy(self, values: torch.Tensor, *, copy: int) -> None:
        """See `Group`; late."""
        self._inner.spread_copy(values, copy=copy)
        self._delay()
