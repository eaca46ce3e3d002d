"""Which units' weights lie in the device's pool, and what comes and goes next: decisions alone.

What is needed last is let go first; what is needed next is loaded as far as that makes room. The
engine carries out the moves; the program counts them. No bytes here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from forebay.errors import BudgetError
from forebay.plan.foresight import Foresight, Pass
from forebay.plan.load_rules import LoadRules
from forebay.units_of_measure import budget_text, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Move", "MoveKind", "WeightPool"]

_NEVER = 1 << 62


class MoveKind(Enum):
    """What happens to a unit's weights."""

    LOAD = "load"
    """They get memory and come up."""
    DROP = "drop"
    """Their memory is free for others."""


@dataclass(frozen=True, slots=True)
class Move:
    """One move of one unit."""

    kind: MoveKind
    unit: int


class WeightPool:
    """Decides what is in the pool.

    Args:
        sizes: Bytes of each streamed unit by index; others are never asked for.
        capacity_bytes: What the pool may hold.
        names: Units' names, for messages.
        rules: What bounds loads beside the room.

    Attributes:
        foresight: The order of uses.
        last: The unit that was used last in this pass.
        uses: Uses so far, a run of uses of the same unit counted once.
        late: Those whose weights were not on their way yet.
        brought_bytes: All loads so far.
    """

    def __init__(
        self,
        sizes: Mapping[int, int],
        *,
        capacity_bytes: int,
        names: Mapping[int, str],
        rules: LoadRules | None = None,
    ) -> None:
        self._rules = rules or LoadRules()
        # Came ahead of their use, which is still to come.
        self._unused: set[int] = set()
        self._sizes = dict(sizes)
        self._names = names
        self.capacity_bytes = self._given_bytes = capacity_bytes
        self.foresight = Foresight(max(sizes, default=-1) + 1)
        self._here: set[int] = set()
        self._held: Counter[int] = Counter()
        self._guarded: set[int] = set()
        self._read: Counter[int] = Counter()
        self.last: int | None = None
        self.uses = 0
        self.late = 0
        self.brought_bytes = 0

    @property
    def here(self) -> frozenset[int]:
        """Units that have memory."""
        return frozenset(self._here)

    @property
    def used_bytes(self) -> int:
        """Bytes of those units."""
        return sum(self._sizes[unit] for unit in self._here)

    def begin(self, kind: Pass, *, then: Pass | None) -> None:
        """A pass begins; see `Foresight.begin`."""
        self.foresight.begin(kind, then=then)
        self._guarded.clear()
        self.last = None

    def hold(self, unit: int) -> None:
        """Keep a unit that is here until `release` was called as often."""
        self._held[unit] += 1

    def is_held(self, unit: int) -> bool:
        """Whether `hold` was called more often than `release`."""
        return unit in self._held

    def release(self, unit: int) -> None:
        """Undo one `hold`."""
        self._held[unit] -= 1
        if self._held[unit] <= 0:
            del self._held[unit]

    def read(self, unit: int) -> None:
        """A unit that is here was read; kept until `forget` unless it is in the way of a use."""
        self._read[unit] += 1

    def forget(self, unit: int) -> None:
        """Undo one `read`."""
        self._read[unit] -= 1
        if self._read[unit] <= 0:
            del self._read[unit]

    def guard(self, unit: int) -> None:
        """Keep a unit until `unguard`."""
        self._guarded.add(unit)

    def unguard(self) -> None:
        """Let go of all guarded units."""
        self._guarded.clear()

    def use(self, unit: int) -> list[Move]:
        """A unit is about to be used.

        Returns:
            The moves that make it so, in order.

        Raises:
            BudgetError: The others that are in use leave no room for it.
        """
        self._unused.discard(unit)
        if unit != self.last:
            self.last = unit
            self.uses += 1
            self.late += unit not in self._here
            self.foresight.use(unit)
        return self.require(unit)

    def require(self, unit: int) -> list[Move]:
        """The moves after which a unit is here, whatever they cost; see `use`."""
        if unit in self._here:
            return []
        moves = self._make_room(self._sizes[unit], worth=-1, keep=(unit, *self._read))
        if moves is None:
            moves = self._make_room(self._sizes[unit], worth=-1, keep=(unit,))
        if moves is None and self.capacity_bytes < self._given_bytes:
            self.capacity_bytes = self._given_bytes
            return self.require(unit)
        if moves is None:
            raise self._no_room(unit)
        self._add(unit)
        return [*moves, Move(MoveKind.LOAD, unit)]

    def ahead(self) -> list[Move]:
        """The moves that bring up what is needed next, as far as they make room for it.

        What the rules let go after its use goes first.
        """
        distances = self.foresight.distances()
        moves, most = self._expired(), self._rules.ahead_bytes
        for unit, distance in distances.items():
            if unit in self._here or unit not in self._sizes:
                continue
            if most is not None and self._unused_bytes() >= most:
                break
            room = self._make_room(
                self._sizes[unit], worth=distance, keep=tuple(self._read), distances=distances
            )
            if room is None:
                break
            self._add(unit)
            self._unused.add(unit)
            moves += [*room, Move(MoveKind.LOAD, unit)]
        return moves

    def _unused_bytes(self) -> int:
        self._unused &= self._here
        return sum(self._sizes[unit] for unit in self._unused)

    def _expired(self) -> list[Move]:
        """Units whose next use lies behind more bytes of others' than the rules let them wait."""
        limit = self._rules.reuse_bytes
        if limit is None:
            return []
        near, between = set(), 0
        for unit in self.foresight.upcoming():
            near.add(unit)
            between += self._sizes.get(unit, 0)
            if between > limit:
                break
        kept = {*self._held, *self._guarded, *self._read, *self._unused, self.last}
        gone = sorted(self._here - near - kept)
        self._here.difference_update(gone)
        return [Move(MoveKind.DROP, unit) for unit in gone]

    def drop(self, unit: int) -> list[Move]:
        """Let go of a unit, whoever would need it next."""
        if unit not in self._here:
            return []
        self._here.discard(unit)
        return [Move(MoveKind.DROP, unit)]

    def lacking_bytes(self, units: Iterable[int]) -> int:
        """How many bytes it would have to hold more to have these units at once."""
        together = {*units, *self._held, *self._guarded}
        needed = sum(self._sizes.get(unit, 0) for unit in together)
        return max(0, needed - self._given_bytes)

    def grow(self, nbytes: int) -> None:
        """Hold more, for a while."""
        self.capacity_bytes = self._given_bytes = self._given_bytes + nbytes

    def shorten(self, nbytes: int) -> list[Move]:
        """Hold less again: what is needed last goes, but for what is held."""
        self._given_bytes -= nbytes
        self.capacity_bytes = min(self.capacity_bytes, self._given_bytes)
        return self._make_room(0, worth=-1) or []

    def shrink(self) -> None:
        """The device has no room for more than is here now: do not look further ahead again.

        Uses that need more are let through, up to what was given.
        """
        least = 2 * max(self._sizes.values(), default=0)
        self.capacity_bytes = min(self._given_bytes, max(self.used_bytes, least))

    def shed(self) -> list[Move]:
        """Let go of every unit that nobody holds now."""
        kept = {*self._held, *self._guarded}
        gone = sorted(self._here - kept)
        self._here &= kept
        return [Move(MoveKind.DROP, unit) for unit in gone]

    def undo(self, moves: Sequence[Move]) -> None:
        """Moves that were decided and not carried out."""
        for move in moves:
            if move.kind is MoveKind.LOAD:
                self._here.discard(move.unit)
                self.brought_bytes -= self._sizes[move.unit]
            else:
                self._here.add(move.unit)

    def _add(self, unit: int) -> None:
        self._here.add(unit)
        self.brought_bytes += self._sizes[unit]

    def _make_room(
        self,
        nbytes: int,
        *,
        worth: int,
        keep: tuple[int, ...] = (),
        distances: Mapping[int, int] | None = None,
    ) -> list[Move] | None:
        """Drop what is needed later than `worth` uses from now; None where that is too little."""
        free = self.capacity_bytes - self.used_bytes
        if free >= nbytes:
            return []
        found = self.foresight.distances() if distances is None else distances
        kept = {*self._held, *self._guarded, *keep}
        if worth >= 0 and self.last is not None:
            kept.add(self.last)
        order = sorted(
            (unit for unit in self._here if unit not in kept),
            key=lambda unit: (found.get(unit, _NEVER), unit),
            reverse=True,
        )
        chosen: list[int] = []
        for unit in order:
            if found.get(unit, _NEVER) <= worth:
                break
            chosen.append(unit)
            free += self._sizes[unit]
            if free >= nbytes:
                self._here.difference_update(chosen)
                return [Move(MoveKind.DROP, unit) for unit in chosen]
        return None

    def _no_room(self, unit: int) -> BudgetError:
        busy = sorted((self._here & {*self._held, *self._guarded}) - {unit})
        taken = sum(self._sizes[other] for other in busy)
        names = ", ".join(self._names[other] for other in busy)
        needed = taken + self._sizes[unit]
        return BudgetError(
            f"cannot bring up {format_bytes(self._sizes[unit])} of weights of unit "
            f"{self._names[unit]}: the pool holds {format_bytes(self.capacity_bytes)}, of which "
            f"{format_bytes(taken)} are in use at the same time ({names or 'nothing'})",
            hint=f"let it hold {budget_text(needed)}: raise forebay.device_budget or "
            "zero_optimization.stage3_max_live_parameters",
        )
