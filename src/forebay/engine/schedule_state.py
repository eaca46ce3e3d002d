"""Whether the saved state of a learning-rate schedule can be one's own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Protocol

from forebay.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["HasState", "check_schedule"]

_HINT: Final = "load_lr_scheduler_states=False leaves schedules as they are"


class HasState(Protocol):
    """A schedule: torch's, or one with its methods."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""


def check_schedule(
    scheduler: HasState | None, saved: Mapping[str, Any] | None, *, hint: str = _HINT
) -> None:
    """Compare; changes nothing.

    Raises:
        CheckpointError: Only one of them is there, or the state is another schedule's.
    """
    if (scheduler is None) != (saved is None):
        raise CheckpointError(
            "the checkpoint has the state of a schedule, and this engine has no schedule"
            if scheduler is None
            else "the checkpoint has no state for this engine's schedule",
            hint=hint,
        )
    if scheduler is None or saved is None:
        return
    here = scheduler.state_dict()
    differ = sorted(here.keys() ^ saved.keys())
    if differ or here.get("name") != saved.get("name"):
        raise CheckpointError(
            f"the checkpoint's schedule is another one: {saved.get('name') or differ[0]!r} "
            f"is not what {type(scheduler).__name__} saves",
            hint=hint,
        )
    for name, value in here.items():
        if not _is_like(saved[name], value):
            raise CheckpointError(f"the checkpoint's schedule has an impossible {name}", hint=hint)


def _is_like(value: Any, here: Any) -> bool:
    """Whether a stranger's value can stand for one of a schedule's own."""
    if here is None:
        return True
    if value is None:  # what is set by the first step may be missing; what is computed with may not
        return type(here) not in {int, float, list, tuple}
    if type(here) is float:
        return type(value) in {int, float} and math.isfinite(value)
    if type(here) is int:  # a count, or an index that may be -1
        return type(value) is int and value >= min(here, 0) and value.bit_length() < 64
    if isinstance(here, list | tuple) and isinstance(value, list | tuple):
        return len(here) == len(value) and all(map(_is_like, value, here))
    return type(value) is type(here)
