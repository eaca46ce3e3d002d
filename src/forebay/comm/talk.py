"""Texts that ranks leave for each other in the store they share: any length, no time limit.

For what takes one rank much longer than another, such as loading a model or writing a checkpoint:
a rank that is gone or has failed is noticed while the others wait; one that is slow is waited for.
One that does not even begin is not: `arrive` has a limit.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import RankError

if TYPE_CHECKING:
    from forebay.comm.life import Life

__all__ = ["Talk"]

_log = logging.getLogger("forebay")

# Most exchanges find the others there already; a long wait costs the store little.
_FIRST_LOOK_SECONDS: Final = 0.001
_LOOK_SECONDS: Final = 0.05
# When one that waits says for whom.
_TELL_SECONDS: Final = 30.0
_HINT: Final = "every rank calls it at the same point"
# How long rank 0, which may keep the store, stays for the others to read.
_READ_SECONDS: Final = 5.0


class Talk:
    """Exchanges of one purpose, numbered; every rank makes the same ones in the same order.

    Not thread-safe; different purposes do not disturb each other, whatever threads they are in.

    Args:
        store: `torch.distributed`'s store, under a prefix of this purpose's own.
        life: Knows whether the others are there.
        rank: This rank.
        size: Number of ranks.
        limit_seconds: How long the others may take to `arrive`.
    """

    def __init__(
        self, store: Any, *, life: Life, rank: int, size: int, limit_seconds: float = math.inf
    ) -> None:
        self._store = store
        self._limit_seconds = limit_seconds
        self._life = life
        self.rank = rank
        self.size = size
        self._count = 0

    def exchange(self, text: str, *, what: str) -> list[str]:
        """Every rank's text, by rank; waits until all have come.

        Args:
            text: This rank's.
            what: What the ranks do, for messages.

        Raises:
            RankError: A rank is gone or has failed.
        """
        return self._explained(text, what, math.inf)

    def arrive(self, *, what: str) -> None:
        """Wait until all have come to what they do together; the first of its exchanges.

        Args:
            what: What the ranks do, for messages.

        Raises:
            RankError: A rank is gone, has failed, or has not come within the limit.
        """
        self._explained("", what, self._limit_seconds)

    def _explained(self, text: str, what: str, limit: float) -> list[str]:
        try:
            return self._exchange(text, what, limit)
        except RankError:
            raise
        except RuntimeError as error:  # the store's own
            raise self._life.explain(error, what=what) from error

    def _exchange(self, text: str, what: str, limit: float) -> list[str]:
        self._count += 1
        self._store.set(f"{self._count}/{self.rank}", text)
        keys = self._keys(self._count)
        self._await(keys, what, limit)
        texts = [bytes(self._store.get(key)).decode() for key in keys]
        self._store.add(f"{self._count}/read", 1)
        if self.rank == 0:
            self._await_readers()
            self._forget(self._count - 1)
        return texts

    def _await(self, keys: list[str], what: str, limit: float) -> None:
        pause, began = _FIRST_LOOK_SECONDS, time.monotonic()
        tells_at, gives_up_at = began + _TELL_SECONDS, began + limit
        while not self._store.check(keys):
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_SECONDS)
            try:
                self._life.look()
            except RankError:
                # one that has read all texts may have failed by them: they are for this rank too
                if self._store.check(keys):
                    return
                self._life.found()
                raise
            if time.monotonic() > gives_up_at and (absent := self._absent(keys)):
                raise self._life.late(absent, what=what, hint=_HINT)
            if time.monotonic() > tells_at:
                tells_at = math.inf
                self._tell(keys, what)

    def _tell(self, keys: list[str], what: str) -> None:
        """No time limit does not mean no word: one of them may never come."""
        absent = self._absent(keys)
        if absent:
            _log.warning(
                "rank %d has waited %.0f s in %s, and goes on waiting, for %s; every rank comes to "
                "it at the same point",
                self.rank,
                _TELL_SECONDS,
                what,
                ", ".join(f"rank {rank} (alive, in {self._life.doings(rank)})" for rank in absent),
            )

    def _absent(self, keys: list[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]

    def _keys(self, count: int) -> list[str]:
        return [f"{count}/{rank}" for rank in range(self.size)]

    def _await_readers(self) -> None:
        """Rank 0 may keep the store: it must not end, having read the texts, before the others."""
        until = time.monotonic() + _READ_SECONDS
        while time.monotonic() < until:
            if self._store.add(f"{self._count}/read", 0) >= self.size:
                return
            time.sleep(_FIRST_LOOK_SECONDS)

    def _forget(self, count: int) -> None:
        """All ranks have read these: they have written the next ones."""
        if count:
            for key in [*self._keys(count), f"{count}/read"]:
                self._store.delete_key(key)
