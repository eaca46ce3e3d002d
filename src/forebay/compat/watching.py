"""What a configuration asks to be measured, and what it brings that was measured before."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from forebay.accelerators.select import accelerator_for, device_name
from forebay.errors import ForebayWarning
from forebay.hardware.profile import load_profile
from forebay.links.observer import NO_OBSERVER
from forebay.observe.breakdown import BreakdownLog
from forebay.observe.clock import clock_for
from forebay.observe.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.config.resolved import ResolvedConfig
    from forebay.hardware.profile import Profile
    from forebay.links.observer import Observer

__all__ = ["enough_threads", "measured_profile", "watcher"]

# A thread more that gains less than this is left to the launching thread and the user's own.
_WORTH_A_THREAD = 0.02

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


def measured_profile(
    config: ResolvedConfig, *, device: torch.device | str | None = None
) -> Profile | None:
    """The profile that `forebay.profile` names; None without one.

    Warns where the device is the processor and torch computes with another number of threads there.

    Raises:
        ConfigError: The file cannot be read, is no profile, or is another machine's or version's.
    """
    if config.profile is None:
        return None
    chosen = accelerator_for(device).device
    profile = load_profile(config.profile, device=device_name(chosen))
    there = None if profile.system is None else profile.system.torch_threads
    here = torch.get_num_threads()
    if chosen.type == "cpu" and there not in (None, here):
        warnings.warn(
            f"profile {config.profile} was measured where torch computes with {there} threads, and "
            f"here it does with {here}: forecasts of forward and backward are of another machine\n"
            f"hint: OMP_NUM_THREADS={there} (torch.set_num_threads), or measure again: "
            "forebay probe --output FILE",
            ForebayWarning,
            stacklevel=2,
        )
    return profile


def enough_threads(profile: Profile) -> int:
    """The fewest threads that update as fast as any number of them, within 2%."""
    best = max(rate.update for rate in profile.threads)
    fast = [r.threads for r in profile.threads if r.update >= (1 - _WORTH_A_THREAD) * best]
    return min(fast)
