"""What an engine moved between two moments, by its own counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.plan.program import Lane

if TYPE_CHECKING:
    from forebay.engine import Engine

__all__ = ["Counters"]


class Counters:
    """An engine's counters from now on.

    Args:
        engine: Whose.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._then = _read(engine)

    def per_update(self, updates: int) -> dict[str, float]:
        """What each of the updates since then moved, and how many weights came in time."""
        now = _read(self._engine)
        moved = {name: now[name] - self._then[name] for name in now}
        uses, late = moved.pop("uses"), moved.pop("late")
        found = {f"{name}_bytes": value / updates for name, value in moved.items()}
        return found if not uses else found | {"weights_in_time": 1 - late / uses}


def _read(engine: Engine) -> dict[str, int]:
    pool, store = engine.streaming.residency.pool, engine.streaming.activations
    return {
        "up": engine.traffic[Lane.UP],
        "down": engine.traffic[Lane.DOWN],
        "activations": 0 if store is None else store.nbytes,
        "uses": pool.uses,
        "late": pool.late,
    }
