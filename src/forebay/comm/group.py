"""A group of ranks: the seam between forebay and `torch.distributed`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from forebay.comm.talk import Talk

__all__ = ["Group"]


class Group(Protocol):
    """Ranks that train one model together.

    Calls: `tell` and the collectives come from one thread (the queue's), in the same order on
    every rank; `doing` before each wait for others; `close` once.
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

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Exchange equal slices: slice r of `sent` goes to rank r, slice r of `received` is its."""
        ...

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Collect each rank's `sent` into its slice of `received`."""
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

    def close(self) -> None:
        """Leave. Idempotent."""
