"""A torch scheduler that follows the curves of a configuration.

It sets `lr`, and for OneCycle `betas`, of an optimizer's groups. The formulas are in
`forebay.optim.curves`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from forebay.errors import ConfigError
from forebay.optim.curves import Curve, OneCycle, curves

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from forebay.config.resolved import SchedulerSpec

__all__ = ["Schedule"]


class Schedule(LRScheduler):
    """A `torch.optim` scheduler that follows a curve for each parameter group.

    As with every torch scheduler the constructor sets the rates of the first update, and
    `step()` after an update those of the next.

    Args:
        optimizer: Whose groups' `lr` (and `betas`, for a curve with momentum) it sets.
        spec: What the configuration says.
        last_epoch: Index of the last update done; -1 before the first.

    Attributes:
        curves: The curve of each group.

    Raises:
        ConfigError: A list of rates whose length is not the number of groups, or a momentum
            without `betas` in every group.

    Example:
        >>> schedule = Schedule(optimizer, resolved.scheduler)  # doctest: +SKIP
    """

    def __init__(self, optimizer: Optimizer, spec: SchedulerSpec, *, last_epoch: int = -1) -> None:
        groups = optimizer.param_groups
        self.curves: tuple[Curve, ...] = tuple(curves(spec, num_groups=len(groups)))
        self._name = spec.name
        if any(_beta1(curve, 0) is not None for curve in self.curves) and not all(
            "betas" in group for group in groups
        ):
            raise ConfigError(
                f"{spec.name} moves the momentum, and {type(optimizer).__name__} has no betas",
                hint='write "cycle_momentum": false',
            )
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """The rates of update `last_epoch`, one for each group."""
        return [
            curve.lr(self.last_epoch, float(base))
            for curve, base in zip(self.curves, self.base_lrs, strict=True)
        ]

    def step(self, epoch: int | None = None) -> None:
        """Sets the rates of the next update; call it after an update that was applied."""
        super().step(epoch)
        self._move_momentum()

    def get_mom(self) -> list[tuple[float, float]]:
        """The groups' betas, under DeepSpeed's name."""
        return [tuple(group["betas"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: where the schedule is. What it is comes from the configuration."""
        return {
            "name": self._name,
            "last_epoch": self.last_epoch,
            "base_lrs": [float(base) for base in self.base_lrs],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved position, with this configuration's curve.

        Raises:
            ConfigError: The state is another schedule's.
        """
        if state_dict["name"] != self._name:
            raise ConfigError(
                f"the saved schedule is {state_dict['name']}, the configured one {self._name}",
                hint="resume with the same scheduler.type, or without the schedule's state",
            )
        self.base_lrs = list(state_dict["base_lrs"])
        self.last_epoch = int(state_dict["last_epoch"])
        # torch counts the constructor's step too.
        self._step_count = self.last_epoch + 1
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate
        self._move_momentum()

    def _move_momentum(self) -> None:
        for group, curve in zip(self.optimizer.param_groups, self.curves, strict=True):
            beta1 = _beta1(curve, self.last_epoch)
            if beta1 is None:
                continue
            if not 0.0 <= beta1 < 1.0:
                raise ConfigError(
                    f"{self._name} asks for beta1 {beta1:g} at update {self.last_epoch}; it must "
                    f"be below 1",
                    hint="lower decay_mom_rate",
                )
            group["betas"] = (beta1, group["betas"][1])


def _beta1(curve: Curve, step: int) -> float | None:
    return curve.beta1(step) if isinstance(curve, OneCycle) else None
