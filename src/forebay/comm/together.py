"""Work that ranks do side by side and that succeeds on all of them or on none.

Each does its share; then all hear whether one of them failed, and fail too. No rank goes on while
another has given up.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, TypeVar

from forebay import errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.comm.group import Group
    from forebay.comm.talk import Talk

__all__ = ["Together"]

_T = TypeVar("_T")


class Together:
    """The ranks of one engine, or a process that is alone.

    Args:
        talk: How they hear of each other; None where there is one process.
        otherwise: What the others raise where one meets an exception that is not forebay's.

    Attributes:
        rank: This rank.
        size: Number of ranks.
    """

    def __init__(self, talk: Talk | None, *, otherwise: type[errors.ForebayError]) -> None:
        self._talk = talk
        self._otherwise = otherwise
        self.rank = 0 if talk is None else talk.rank
        self.size = 1 if talk is None else talk.size

    @classmethod
    def of(
        cls, group: Group | None, name: str, *, otherwise: type[errors.ForebayError]
    ) -> Together:
        """The ranks of a group; `name` tells one purpose's exchanges from another's."""
        alone = group is None or group.size == 1
        return cls(None if alone or group is None else group.talk(name), otherwise=otherwise)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which does what only one of them does."""
        return self.rank == 0

    def arrive(self, *, what: str) -> None:
        """Wait until all ranks have begun the same, no longer than for a pass.

        Raises:
            RankError: A rank has not come, or is gone.
        """
        if self._talk is not None:
            self._talk.arrive(what=what)

    def tell(self, text: str, *, what: str) -> list[str]:
        """Every rank's text, by rank."""
        return [text] if self._talk is None else self._talk.exchange(text, what=what)

    def agree(self, text: str, *, what: str) -> None:
        """Go on only where every rank says the same.

        Raises:
            RankError: A rank says something else than rank 0, or is gone.
        """
        told = self.tell(text, what=what)
        for rank, other in enumerate(told):
            if other != told[0]:
                here, first = other or "nothing", told[0] or "nothing"
                raise errors.RankError(
                    f"{what} is for {here} on rank {rank} and for {first} on rank 0",
                    hint="every rank calls it with the same arguments",
                )

    def run(self, work: Callable[[], _T], *, what: str) -> _T:
        """Do this rank's share of something, and wait for the others.

        Args:
            work: This rank's share.
            what: What all of them do, for messages.

        Returns:
            What `work` returned; all ranks' work has succeeded.

        Raises:
            ForebayError: Another rank's work failed; it is named.
            RankError: A rank is gone.
        """
        if self._talk is None:
            return work()
        try:
            result = work()
        except BaseException as error:
            with contextlib.suppress(errors.RankError):  # the first error says more
                self._talk.exchange(_said(error), what=what)
            raise
        for rank, text in enumerate(self._talk.exchange("", what=what)):
            if text:
                raise self._heard(rank, text)
        return result

    def first(self, work: Callable[[], _T], *, what: str) -> _T | None:
        """`run`, where rank 0 alone has work; None on the others."""

        def _nothing() -> _T | None:
            return None

        return self.run(work if self.is_first else _nothing, what=what)

    def _heard(self, rank: int, text: str) -> errors.ForebayError:
        said: dict[str, Any] = json.loads(text)
        known = getattr(errors, said["kind"], None)
        kind: type[errors.ForebayError] = known if known is not None else self._otherwise
        return kind(f"rank {rank} of {self.size}: {said['message']}", hint=said["hint"])


def _said(error: BaseException) -> str:
    ours = isinstance(error, errors.ForebayError)
    message = error.message if isinstance(error, errors.ForebayError) else str(error)
    return json.dumps(
        {
            "kind": type(error).__name__ if ours else "",
            "message": message or type(error).__name__,
            "hint": error.hint if isinstance(error, errors.ForebayError) else None,
        }
    )
