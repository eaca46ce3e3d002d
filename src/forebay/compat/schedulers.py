"""The learning-rate schedule of an engine: the caller's, or the configuration's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forebay.compat.inputs import class_name
from forebay.errors import ConfigError
from forebay.optim.schedule import Schedule

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from forebay.config.resolved import SchedulerSpec

__all__ = ["build_scheduler", "check_scheduler"]


def check_scheduler(given: Any, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a scheduler over groups that are not trained: it would move nothing.

    Raises:
        ConfigError: Its optimizer is another one.
    """
    owner = getattr(given, "optimizer", None)
    if not isinstance(owner, torch.optim.Optimizer):
        return
    ours = {id(group) for group in optimizer.param_groups}
    if not any(id(group) in ours for group in owner.param_groups):
        raise ConfigError(
            f"the lr_scheduler {class_name(given)} was built on another optimizer, whose learning "
            "rates nobody reads",
            hint="pass that optimizer too, or a function: lr_scheduler=lambda optimizer: ...",
        )


def build_scheduler(
    given: Any, spec: SchedulerSpec | None, optimizer: torch.optim.Optimizer
) -> LRScheduler | None:
    """The schedule; it has set the rates of the first update.

    Args:
        given: The caller's scheduler, or a function from the optimizer to one, or None.
        spec: The configuration's.
        optimizer: The torch optimizer whose groups are trained.

    Raises:
        ConfigError: The function returned no scheduler.
    """
    if given is None:
        return None if spec is None else Schedule(optimizer, spec)
    # A class has a `step` too, but no schedule yet.
    if not isinstance(given, type) and callable(getattr(given, "step", None)):
        scheduler: LRScheduler = given
        return scheduler
    made: LRScheduler = given(optimizer)
    if not callable(getattr(made, "step", None)):
        raise ConfigError(
            f"the lr_scheduler function {class_name(given)} returned {type(made).__name__}, which "
            "has no step()",
            hint="lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, ...)",
        )
    check_scheduler(made, optimizer)
    return made
