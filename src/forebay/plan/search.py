"""Update places by trial: what a score, such as the simulator's seconds, says is best.

[Note: search] The first units streamed and the rest on the host is the form of nearly every best
answer, so that one number is looked for, from a start outwards in shrinking strides. Where units
are few, one more or less is much of the model: then each unit, and each pair, is changed in turn
for as long as that helps.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from forebay.plan.placement import UpdatePlace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["search_places"]

_Places = tuple[UpdatePlace, ...]

# Less than this share of the score is no gain.
_GAIN = 1e-3
# With so few units each of them is tried in both places.
_FEW = 8


class _Search:
    def __init__(
        self, *, score: Callable[[_Places], float], fits: Callable[[_Places], bool], trials: int
    ) -> None:
        self._score = score
        self._fits = fits
        self._left = trials
        self._known: dict[_Places, float] = {}

    def score(self, places: _Places) -> float:
        """Infinite for what does not fit, and for what is new when the trials are used up."""
        if places not in self._known:
            if not self._fits(places) or self._left <= 0:
                return float("inf")
            self._left -= 1
            self._known[places] = self._score(places)
        return self._known[places]

    def better(self, one: _Places, other: _Places) -> bool:
        return self.score(one) < self.score(other) * (1 - _GAIN)

    @property
    def best(self) -> _Places:
        return min(self._known, key=lambda places: self._known[places])


def search_places(
    start: Sequence[UpdatePlace],
    *,
    score: Callable[[_Places], float],
    fits: Callable[[_Places], bool] = lambda _places: True,
    trials: int = 200,
) -> _Places:
    """The best places that were found; see [Note: search].

    Args:
        start: Streamed units first, the rest on the host; it fits.
        score: Seconds of a step, the less the better.
        fits: Whether places may be taken.
        trials: How often `score` may be called, at least once.
    """
    count, streamed = len(start), list(start).count(UpdatePlace.STREAMED)
    search = _Search(score=score, fits=fits, trials=max(1, trials))
    chosen = _split(count, streamed)
    search.score(chosen)
    stride = max(1, count // 8)
    while stride:
        sides = (streamed - stride, streamed + stride)
        best = min(sides, key=lambda k: search.score(_split(count, k)) if 0 <= k <= count else 1e99)
        if 0 <= best <= count and search.better(_split(count, best), _split(count, streamed)):
            streamed = best
        else:
            stride //= 2
    if count > _FEW:
        return search.best
    # Two hills: streamed units first, and last.
    tops = []
    for forms in (range(count + 1), range(-count, 1)):
        first = min((_split(count, k) for k in forms), key=search.score)
        tops.append(_climbed(first, search))
    return min(tops, key=search.score)


def _split(count: int, streamed: int) -> _Places:
    """The first units streamed; with a negative number the last ones."""
    visits, rest = (UpdatePlace.STREAMED,) * abs(streamed), count - abs(streamed)
    stays = (UpdatePlace.HOST,) * rest
    return visits + stays if streamed >= 0 else stays + visits


def _climbed(start: _Places, search: _Search) -> _Places:
    """Change units and pairs of units for as long as that helps."""
    places = start
    while True:
        count = range(len(places))
        changes = [*((i,) for i in count), *itertools.combinations(count, 2)]
        near = [_changed(places, change) for change in changes]
        best = min(near, key=search.score, default=places)
        if not search.better(best, places):
            return places
        places = best


def _changed(places: _Places, change: Sequence[int]) -> _Places:
    other = {
        UpdatePlace.HOST: UpdatePlace.STREAMED,
        UpdatePlace.STREAMED: UpdatePlace.HOST,
    }
    return tuple(other[place] if i in change else place for i, place in enumerate(places))
