"""What may be asked for of the time of updates: one frozen value for each policy.

The objects that act on them are `forebay.engine.policies`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from forebay.plan.zenflow import ZenFlow

__all__ = ["EXACT", "Delayed", "DuringBackward", "Exact", "Policy", "Speculative"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """Updates begin when norm and finiteness of the whole gradient are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DuringBackward:
    """A unit updates when its gradient of the window's last backward is complete.

    Legal where nothing that only the step knows is needed, with the same bits as `Exact`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Delayed:
    """A step's new weights come into force with the next step: its update has all of that step.

    Attributes:
        warm_up_steps: Updates at the start that are exact.
    """

    warm_up_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculative:
    """Host updates run during backward into a second state, which the step takes or discards.

    The same bits as `Exact`: what is taken was made with the factor, hyperparameters and gradient
    that the step decides on. Whatever was not is made anew in the step.

    Attributes:
        most_discarded: Nothing is tried while more than this share of the last steps was clipped or
            skipped; what is tried in vain costs a pass over the state.
    """

    most_discarded: float = 0.25


Policy: TypeAlias = Exact | DuringBackward | Delayed | Speculative | ZenFlow

# What acts where nobody asks for another.
EXACT: Final = Exact()
