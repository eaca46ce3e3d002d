"""Whether all ranks update with the same options: a schedule may follow each rank's own loss.

Slices of one weight would be updated with different rates, or copies of it part for good.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from forebay.comm.same import different_texts, mark_of
from forebay.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.comm.group import Group
    from forebay.engine.terms import UpdateTerms

__all__ = ["SameTerms"]

_HINT = (
    "let a schedule see the same number on every rank: the mean of their losses, for example "
    "(torch.distributed.all_reduce), and set options on all ranks alike"
)


class SameTerms:
    """Compares what an update is made with; as long as it is the same that costs one number.

    Args:
        terms: This rank's.
        group: The ranks.
    """

    def __init__(self, terms: UpdateTerms, *, group: Group) -> None:
        self._terms = terms
        self._group = group

    def mark(self) -> float:
        """One number for the others: whoever tells another has other terms."""
        return mark_of(self._text())

    def refuse_other(self, marks: Sequence[float]) -> None:
        """Every rank calls it with the same marks, by rank.

        Raises:
            RankError: On every rank, when one differs from rank 0; names the first difference.
        """
        what = "the options of a step"
        texts = different_texts(self._text(), marks=marks, group=self._group, what=what)
        if not texts:
            return
        first = json.loads(texts[0])
        for rank, text in enumerate(texts):
            for (name, value), (_, other) in zip(first, json.loads(text), strict=False):
                if value != other:
                    raise RankError(
                        f"{name} is {other} on rank {rank} and {value} on rank 0 at a step",
                        hint=_HINT,
                    )
        raise RankError("ranks have different numbers of parameter groups at a step", hint=_HINT)

    def _text(self) -> str:
        return json.dumps(self._terms.facts())
