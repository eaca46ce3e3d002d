"""When a unit's gradient leaves for its update, and what all ranks know of it then.

With one rank it leaves as soon as it is complete, and nobody else is asked; with several see
`forebay.engine.reducer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from forebay.engine.record import GradientState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.engine.collector import Collector
    from forebay.engine.executor import Executor
    from forebay.engine.record import ParamRecord
    from forebay.engine.unit import Unit
    from forebay.engine.window import Window
    from forebay.plan.program import Program

__all__ = ["Alone", "Departure"]


class Departure(Protocol):
    """Sends gradients on their way.

    Calls per backward: `begin` at its first gradient, `complete` for units as they are complete,
    `end`. Per update: `seal` with what has not left yet, `square_sums`,
    `window_ended`. `discard` where
    the window is dropped instead.
    """

    @property
    def ranks(self) -> int:
        """How many ranks add up their gradients."""
        ...

    @property
    def leaves_every_backward(self) -> bool:
        """Whether gradients leave after every backward, and not after the window's last alone."""
        ...

    @property
    def is_spread(self) -> bool:
        """Whether gradients of this window have been given to other ranks."""
        ...

    def begin(self, window: Window) -> None:
        """A backward begins."""

    def complete(self, program: Program, unit: Unit, *, last: bool) -> None:
        """A unit's gradient of this backward is complete, as far as known."""

    def end(self, program: Program, *, last: bool) -> None:
        """The backward has ended."""

    def ran(self, order: tuple[int, ...]) -> None:
        """The last forward ran the units in this order."""

    def has_more(self, unit: Unit) -> bool:
        """Whether some gradient of the unit has not left (or its norm not been taken) yet."""
        ...

    def seal(self, collector: Collector, more: Sequence[Unit]) -> None:
        """The window ends; `more` are the units that have not left yet."""

    def square_sums(self, present: Sequence[ParamRecord]) -> dict[int, float]:
        """Squares by parameter index, of the parameters that have a gradient on any rank.

        Args:
            present: Those that have one here.
        """
        ...

    def settle(self, program: Program) -> None:
        """Sums over ranks that have begun are there when this returns."""

    def window_ended(self) -> None:
        """The window's gradients were used."""

    def discard(self) -> None:
        """The window's gradients were dropped."""


class Alone:
    """One rank.

    Args:
        executor: Carries out what a complete gradient starts.
        on_order: Told of the order in which units run, when it changes.
        count: Number of units.
    """

    ranks = 1
    leaves_every_backward = False
    is_spread = False

    def __init__(
        self, executor: Executor, *, on_order: Callable[[tuple[int, ...]], None], count: int
    ) -> None:
        self._executor = executor
        self._on_order = on_order
        self._order = tuple(range(count))

    def ran(self, order: tuple[int, ...]) -> None:
        """See `Departure`."""
        if order != self._order:
            self._order = order
            self._on_order(order)

    def begin(self, window: Window) -> None:
        """Nobody is asked."""

    def complete(self, program: Program, unit: Unit, *, last: bool) -> None:
        """See `Departure`."""
        self._executor.gradient_complete(program, unit, last=last)

    def end(self, program: Program, *, last: bool) -> None:
        """Nothing was held back."""

    def has_more(self, unit: Unit) -> bool:
        """See `Departure`."""
        if unit.updates_on_device:
            return not unit.departed and any(r.state is GradientState.OPEN for r in unit.records)
        return any(r.state is GradientState.OPEN or r.addends for r in unit.records)

    def seal(self, collector: Collector, more: Sequence[Unit]) -> None:
        """See `Departure`."""
        for unit in more:
            self._executor.gradient_complete(collector.program, unit, last=True)

    def square_sums(self, present: Sequence[ParamRecord]) -> dict[int, float]:
        """See `Departure`."""
        sums = self._executor.local.square_sums(present)
        return {record.index: sums[record.index] for record in present}

    def settle(self, program: Program) -> None:
        """There are none."""

    def window_ended(self) -> None:
        """Nothing to forget."""

    def discard(self) -> None:
        """Nothing to forget."""
