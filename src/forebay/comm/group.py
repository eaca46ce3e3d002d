"""A group of ranks: the seam between forebay and `torch.distributed`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from forebay.comm.talk import Talk

__all__ = ["Group"]


class Group(Protocol):
    """Ranks that train one model together.

    All of them hold one copy of the sharded state together, or equal groups of them one copy each.

    Calls: `compare` and then `connect` come from the thread that makes the engine; `tell` and the
    collectives from one thread (the queue's), in the same order on every rank; `part` after them,
    where no rank has failed; `close` once.
    """

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def local_rank(self) -> int:
        """This rank, counted on its machine."""
        ...

    @property
    def local_size(self) -> int:
        """Number of ranks on this machine."""
        ...

    @property
    def shard(self) -> int:
        """This rank, counted among those that it shares one copy of the state with."""
        ...

    @property
    def sharers(self) -> Sequence[int]:
        """Those ranks, this one included, in the order of their slices; all of them by default."""
        ...

    @property
    def copy(self) -> int:
        """Which of the copies of the state they hold, counted from 0."""
        ...

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Exchange equal slices among sharers.

        Slice r of `sent` goes to the r-th of them, slice r of `received` is its.
        """
        ...

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Collect each sharer's `sent` into its slice of `received`."""
        ...

    def reduce_scatter(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Add up sharers' `sent` by the library's own sum; `received` is this rank's slice."""
        ...

    def gather_copies(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Collect `sent` of each rank that has the same slice of another copy, copy by copy."""
        ...

    def spread_copy(self, values: torch.Tensor, *, copy: int) -> None:
        """Make `values` those of the rank that has the same slice of this copy."""
        ...

    def connect(self) -> None:
        """Make what exchanges need, once all ranks have come; idempotent.

        Raises:
            RankError: A rank is gone or has failed.
        """
        ...

    def tell(self, values: torch.Tensor, *, what: str) -> torch.Tensor:
        """Tell all ranks as many numbers as they tell; returns every rank's, [size, n].

        Args:
            values: float64 [n], on the host.
            what: What this rank is about to do, for messages.

        Raises:
            RankError: A rank does not come within the time limit, or is gone.
        """
        ...

    def compare(self, text: str, *, what: str) -> list[str]:
        """Every rank's text, by rank. For the start: slow, and of any length."""
        ...

    def talk(self, name: str) -> Talk:
        """Exchanges of texts for one purpose, from any one thread; the same one for a name."""
        ...

    def check(self) -> None:
        """Raise RankError when another rank has failed or is gone; called while waiting."""

    def fail(self, reason: str) -> None:
        """Let the others know that this rank has failed."""

    def part(self) -> None:
        """Give back what exchanges need; every rank calls it, after its last one."""

    def close(self) -> None:
        """Leave. Idempotent."""
