"""The terms of the coming update: whose options, by which rule, clipped at what norm.

They belong to the user until they are captured: groups are the optimizer's own dictionaries, and
the bound may be set at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.optim.clip import gradient_scale
from forebay.optim.flat_state import native_hypers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.engine.record import ParamRecord
    from forebay.optim.rule import AdamRule, Hyper

__all__ = ["UpdateOrder", "UpdateTerms"]


class UpdateOrder:
    """What one update is made with: hyperparameters and the one scale.

    Attributes:
        hypers: Distinct captured hyperparameters.
        hyper_of: For each present parameter's index, its place in `hypers`.
        scale: What gradients are multiplied by, float32.
    """

    def __init__(self, hypers: Sequence[Hyper], hyper_of: dict[int, int], scale: float) -> None:
        self.hypers = tuple(hypers)
        self.hyper_of = hyper_of
        self.scale = scale
        self._native: list[Any] | None = None

    def native(self, core: Any) -> list[Any]:
        """The hyperparameters in the native core's form."""
        if self._native is None:
            self._native = native_hypers(core, self.hypers)
        return self._native


class UpdateTerms:
    """Captures update orders.

    Args:
        groups: The optimizer's groups; shared, read when captured.
        rule: How a group becomes the numbers of an update.
        clip_norm: Bound on the global norm; None does not clip.

    Attributes:
        clip_norm: The bound; may be set at any time.
    """

    def __init__(
        self, groups: Sequence[dict[str, object]], *, rule: AdamRule, clip_norm: float | None
    ) -> None:
        self._groups = groups
        self.rule = rule
        self.clip_norm = clip_norm

    def validate(self) -> None:
        """Refuse options that cannot be honoured, before anything of a step is final.

        Raises:
            ConfigError: A number is missing or out of its range.
            UnsupportedError: An option is refused, or groups have different directions.
        """
        self.rule.validate_all(self._groups)

    def facts(self) -> list[tuple[str, str]]:
        """Names and values of what the coming update is made with, alike on all ranks."""
        bound = ("the bound on the norm of gradients", str(self.clip_norm))
        return [bound] + [
            (f"{name} of parameter group {index}", str(value))
            for index, group in enumerate(self._groups)
            for name, value in self.rule.options_of(group).items()
        ]

    def capture(
        self,
        records: Sequence[ParamRecord],
        *,
        norm: float,
        divisor: float = 1.0,
        ahead: int = 1,
    ) -> UpdateOrder:
        """The order for the next update of `records`, with the options as they are now.

        Args:
            records: The parameters that have a gradient.
            norm: The global norm, for the clip factor.
            divisor: What gradients are too large by.
            ahead: Updates beyond those that the records have counted.
        """
        hypers: list[Hyper] = []
        place: dict[tuple[int, int], int] = {}
        hyper_of: dict[int, int] = {}
        for record in records:
            key = (record.group, record.step + ahead)
            if key not in place:
                place[key] = len(hypers)
                hypers.append(self.rule.capture(self._groups[record.group], key[1]))
            hyper_of[record.index] = place[key]
        scale = gradient_scale(norm, max_norm=self.clip_norm, divisor=divisor)
        sign = hypers[0].sign if hypers else 1.0  # `validate` saw that all have one
        return UpdateOrder(hypers, hyper_of, scale * sign)
