"""What a watcher of a running engine hears; nobody listens by default.

The engine reports moments, waits and tickets, and knows no more of what watches it. A call
costs a third of a microsecond while nobody listens.
"""

from __future__ import annotations

import contextlib
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from forebay.plan.program import Lane, OpKind

__all__ = ["NO_OBSERVER", "Moment", "NoObserver", "Observer"]


class Moment(Enum):
    """A point that the calling thread and its compute stream have reached."""

    FORWARD_BEGIN = "forward_begin"
    """The root module is called."""
    UNIT_BEGIN = "unit_begin"
    """A unit is about to compute in a forward, its weights being there."""
    FORWARD_END = "forward_end"
    """The root module returns."""
    BACKWARD_BEGIN = "backward_begin"
    """Autograd begins with the root's outputs."""
    UNIT_END = "unit_end"
    """A unit's gradient is complete."""
    BACKWARD_END = "backward_end"
    """Autograd has ended."""
    STEP_BEGIN = "step_begin"
    """The optimizer's step is called."""
    AGREED = "agreed"
    """Norm and finiteness are known; updates begin."""
    UPDATE_BEGIN = "update_begin"
    """A unit's update on the device is about to be enqueued."""
    UPDATE_END = "update_end"
    """It is enqueued."""
    STEP_END = "step_end"
    """The step returns."""
    WEIGHTS_IN_TIME = "weights_in_time"
    """A pass uses a unit whose weights live on the host, and they are there or on their way."""
    WEIGHTS_LATE = "weights_late"
    """They are fetched only now."""
    GATHERED_UNEVENLY = "gathered_unevenly"
    """Ranks gathered a unit that some of them needed when others did not."""
    IDLE = "idle"
    """Device and lanes have done everything."""


class Observer(Protocol):
    """A watcher; the engine calls it from the main thread and from autograd's.

    Calls in order, each step: `mark` at every moment; `waiting` around everything that may block;
    `doing` before operations, each followed by `submitted` for the tickets that they take.
    """

    def mark(self, moment: Moment, unit: str = "") -> None:
        """The calling thread's compute stream reaches `moment` (of a unit)."""
        ...

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Around a wait, of the host or of the compute stream."""
        ...

    def doing(self, kind: OpKind, unit: str) -> None:
        """The tickets that follow belong to this operation."""
        ...

    def submitted(self, lane: Lane, ticket: Any, nbytes: int) -> None:
        """Work was put on a lane; `nbytes` cross the link."""
        ...


class NoObserver:
    """Hears nothing."""

    def mark(self, moment: Moment, unit: str = "") -> None:
        """Nothing."""

    def waiting(self, what: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Nothing."""
        return _NOTHING

    def doing(self, kind: OpKind, unit: str) -> None:
        """Nothing."""

    def submitted(self, lane: Lane, ticket: Any, nbytes: int) -> None:
        """Nothing."""


_NOTHING = contextlib.nullcontext()
NO_OBSERVER = NoObserver()
