"""The record of one step: its phases and everything that ran for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.plan.timeline import Timeline

__all__ = ["Phase", "StepRecord"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One forward, backward or step, on the compute stream's clock, in seconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step.

    Attributes:
        step: Its number.
        begin: When its first forward began, in seconds of the monotonic clock.
        end: When the next step's first forward began.
        agreed: When the norm was known and updates began; None when the step was skipped before.
        phases: "forward", "backward" and "step" in the order of time.
        timeline: Everything that ran for it, also after its end.
        weights_in_time: Uses of units whose weights live on the host and were there, or coming.
        weights_late: Uses of those that had to be fetched at that moment.
        gathers_uneven: Gathers of units that some ranks needed when others did not.
    """

    step: int
    begin: float
    end: float
    agreed: float | None
    phases: tuple[Phase, ...]
    timeline: Timeline
    weights_in_time: int = 0
    weights_late: int = 0
    gathers_uneven: int = 0

    def phase_seconds(self, name: str) -> float:
        """Seconds of all phases of one name."""
        return sum(phase.end - phase.begin for phase in self.phases if phase.name == name)
