"""What a configuration asks to be measured, and what it brings that was measured before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.accelerators.select import accelerator_for, device_name
from forebay.hardware.profile import load_profile
from forebay.links.observer import NO_OBSERVER
from forebay.observe.breakdown import BreakdownLog
from forebay.observe.clock import clock_for
from forebay.observe.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from forebay.config.resolved import ResolvedConfig
    from forebay.links.observer import Observer
    from forebay.plan.solve import Rates

__all__ = ["measured_rates", "watcher"]

# As `steps_per_print` where that is not given.
_STEPS_PER_MEAN = 10


def watcher(config: ResolvedConfig) -> Callable[[torch.device], Observer]:
    """What makes the observer that `wall_clock_breakdown` asks for, given an engine's device."""
    every = config.steps_per_print or _STEPS_PER_MEAN

    def _make(device: torch.device) -> Observer:
        if not config.wall_clock_breakdown:
            return NO_OBSERVER
        return Recorder(clock_for(device), on_record=BreakdownLog(every=every))

    return _make


def measured_rates(
    config: ResolvedConfig, *, device: torch.device | str | None = None
) -> Rates | None:
    """The bandwidths of the profile that `forebay.profile` names; None without one.

    Raises:
        ConfigError: The file cannot be read, is no profile, or is another machine's or version's.
    """
    if config.profile is None:
        return None
    chosen = accelerator_for(device).device
    return load_profile(config.profile, device=device_name(chosen)).rates()
