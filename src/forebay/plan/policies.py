"""What may be asked for of the time of updates: one frozen value for each policy.

The objects that act on them are `forebay.engine.policies`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from forebay.plan.zenflow import ZenFlow

__all__ = ["EXACT", "Delayed", "DuringBackward", "Exact", "Policy"]


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


Policy: TypeAlias = Exact | DuringBackward | Delayed | ZenFlow

# What acts where nobody asks for another.
EXACT: Final = Exact()
