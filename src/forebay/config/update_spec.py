"""When updates run and come into force, decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

__all__ = ["WARM_UP_STEPS", "UpdateKind", "UpdateSpec"]

UpdateKind = Literal["exact", "speculative", "delayed", "zenflow"]
# ZeRO-Offload's authors begin to delay after 40 steps.
WARM_UP_STEPS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSpec:
    """One of forebay's modes.

    Attributes:
        kind: Its name; zenflow has settings of its own.
        warm_up_steps: Of delayed: updates at the start that are exact.
    """

    kind: UpdateKind = "exact"
    warm_up_steps: int = WARM_UP_STEPS

    def own_keys(self) -> dict[str, Any]:
        """The keys of the section `forebay`."""
        return {"update": self.kind, "warm_up_steps": self.warm_up_steps}
