"""ZenFlow's settings: which steps choose columns, and after which the rest is updated.

Steps are updates that were applied, counted from 1; skipped ones do not count. Of the first
`warm_up_steps` each updates everything, as the exact mode does. From then on *important* columns
are updated in every step, by its gradient; the gradients of the *rest* are gathered and used once
in an interval. When columns are to be chosen anew, the rest is updated in the step before, so that
nothing is gathered for columns whose importance changes.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ZenFlow"]

_USUAL_INTERVAL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ZenFlow:
    """What an engine in this mode does.

    Attributes:
        topk_ratio: Share of each parameter's columns that are important, above 0 and below 1.
        select_every: Steps from one choice to the next; None chooses once.
        update_every: Steps from one update of the rest to the next; None lets the gradients
            decide.
        auto_ratio: Where they decide: the share of the parameters in which a column of the rest
            must have gathered as much as an important one gets in a step.
        warm_up_steps: Steps at the start that update everything.
        overlaps: Whether the update of the rest runs beside the following interval and comes into
            force at its end.
        keeps_state_on_host: Whether the important columns' state is on the device during its
            update only.
    """

    topk_ratio: float = 0.1
    select_every: int | None = None
    update_every: int | None = _USUAL_INTERVAL
    auto_ratio: float = 0.99
    warm_up_steps: int = 0
    overlaps: bool = False
    keeps_state_on_host: bool = False

    @property
    def interval(self) -> int:
        """Steps from one update of the rest to the next; where gradients decide, a usual number."""
        return self.update_every or _USUAL_INTERVAL

    def warms_up(self, step: int) -> bool:
        """Whether a step updates everything."""
        return step <= self.warm_up_steps

    def selects(self, step: int) -> bool:
        """Whether a step chooses columns, by its own gradient."""
        since = step - self.warm_up_steps - 1
        if since <= 0 or self.select_every is None:
            return since == 0
        return since % self.select_every == 0

    def updates_rest(self, step: int) -> bool:
        """Whether the rest is updated after a step, whatever the gradients say."""
        since = step - self.warm_up_steps
        if since <= 0:
            return False
        due = self.update_every is not None and since % self.update_every == 0
        return due or self.selects(step + 1)
