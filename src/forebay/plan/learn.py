"""Corrections of a profile from runs: predicted seconds are made to meet measured ones.

Two factors, of computation and of the update on the host. A run teaches the one that bounds it: the
factor is found at which the forecast is what was measured, everything else left alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forebay.errors import ConfigError
from forebay.plan.step import step_forecast
from forebay.units_of_measure import format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.hardware.profile import Profile
    from forebay.plan.run_record import RunRecord

__all__ = ["Lesson", "learn"]

# A run that is further off than this was not made on the machine of the profile.
_MOST = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What one run taught.

    Attributes:
        predicted: Seconds that the profile said before.
        measured: Seconds that an update took.
        taught: "compute" or "host_update".
        factor: What it is multiplied by.
    """

    predicted: float
    measured: float
    taught: str
    factor: float

    def sentence(self) -> str:
        """The lesson in words."""
        noun = {"compute": "computation", "host_update": "the update on the host"}[self.taught]
        return (
            f"predicted {format_seconds(self.predicted)} an update, measured "
            f"{format_seconds(self.measured)}: {noun} takes {self.factor:.2f} times as long"
        )


def learn(profile: Profile, runs: Sequence[RunRecord]) -> tuple[Profile, tuple[Lesson, ...]]:
    """Correct a profile.

    Args:
        profile: The machine's.
        runs: Runs on that machine.

    Returns:
        The profile with corrections, and what each run taught. Each factor is the geometric mean of
        what the runs say of it.

    Raises:
        ConfigError: A run is another machine's, or further off than any correction can mend.
    """
    for run in runs:
        profile.check_machine(run.machine, source="the run")
    lessons = tuple(_lesson(profile, run) for run in runs)
    factors = {}
    for name in ("compute", "host_update"):
        said = [one.factor for one in lessons if one.taught == name]
        mean = math.exp(sum(map(math.log, said)) / len(said)) if said else 1.0
        factors[name] = getattr(profile.corrections, name) * mean
    corrections = replace(
        profile.corrections, **factors, runs=(profile.corrections.runs or 0) + len(runs)
    )
    return replace(profile, corrections=corrections), lessons


def _lesson(profile: Profile, run: RunRecord) -> Lesson:
    forecast = step_forecast(run.shape, run.setup, profile=profile)
    rest = forecast.seconds - forecast.compute_seconds
    taught = "compute" if forecast.compute_seconds >= rest else "host_update"
    measured = run.measured.seconds
    low, high = 1 / _MOST, _MOST
    if not _with(profile, run, taught, low) <= measured <= _with(profile, run, taught, high):
        ratio = measured / forecast.seconds
        raise ConfigError(
            f"the run took {measured:.3g} s an update and {forecast.seconds:.3g} s were predicted, "
            f"{ratio:.3g} times as much; it must be between {1 / _MOST:.3g} and {_MOST:.3g} times",
            hint="measure this machine again with: forebay probe --output FILE",
        )
    for _ in range(40):
        middle = math.sqrt(low * high)
        if _with(profile, run, taught, middle) < measured:
            low = middle
        else:
            high = middle
    return Lesson(
        predicted=forecast.seconds,
        measured=measured,
        taught=taught,
        factor=math.sqrt(low * high),
    )


def _with(profile: Profile, run: RunRecord, name: str, factor: float) -> float:
    changed = {name: getattr(profile.corrections, name) * factor}
    corrected = replace(profile, corrections=replace(profile.corrections, **changed))
    return run.predict(corrected)
