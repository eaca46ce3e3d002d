"""The section `zenflow`, decided; and what its intervals must be to each other on every face."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forebay.errors import ConfigError

__all__ = ["ZenflowSpec", "refuse_late_rest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZenflowSpec:
    """Important columns in every step on the device, the rest once an interval.

    Attributes:
        topk_ratio: Share of each parameter's columns that are important.
        select_steps: Updates from one choice of columns to the next; None chooses once.
        update_steps: Updates from one update of the rest to the next; None lets gradients decide.
        auto_ratio: The share of parameters that must be ripe where they decide.
        warm_up_steps: Updates at the start that update everything.
        overlaps: Whether the rest is updated beside training.
        keeps_state_on_host: Whether the important columns' state is on the host between updates.
    """

    topk_ratio: float = 0.1
    select_steps: int | None = None
    update_steps: int | None = None
    auto_ratio: float = 0.99
    warm_up_steps: int = 0
    overlaps: bool = False
    keeps_state_on_host: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The section, with what was counted in epochs in updates."""
        by_steps = {"select_strategy": "step", "select_interval": self.select_steps}
        return {
            "topk_ratio": self.topk_ratio,
            **({} if self.select_steps is None else by_steps),
            "update_interval": "auto" if self.update_steps is None else self.update_steps,
            "auto_ratio": self.auto_ratio,
            "full_warm_up_rounds": self.warm_up_steps,
            "overlap_step": self.overlaps,
            "offload": self.keeps_state_on_host,
        }


def refuse_late_rest(*, update_steps: int | None, select_steps: int | None, what: str) -> None:
    """Raise ConfigError where columns are chosen anew before the rest is updated.

    Args:
        update_steps: As `ZenflowSpec.update_steps`.
        select_steps: As `ZenflowSpec.select_steps`.
        what: What the user wrote `update_steps` as.
    """
    if update_steps is None or select_steps is None or update_steps <= select_steps:
        return
    raise ConfigError(
        f"{what} = {update_steps} is above the {select_steps} updates after which columns are "
        "chosen anew: the rest would never be updated at its own time",
        hint=f"write an integer from 1 to {select_steps}",
    )
