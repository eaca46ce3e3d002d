"""Corrections of a profile from runs: what is predicted is made to meet what was measured.

Two factors of seconds, of computation and of the update on the host. A run teaches the one that
bounds it: the factor is found at which the forecast is what was measured, everything else left
alone. A third factor, of activations, from what torch held at its peak beside what was placed. A
fourth, of drives, from the seconds in which a run's files were read and written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forebay.errors import ConfigError
from forebay.plan.placement import UpdatePlace
from forebay.plan.tiers import tier_bytes
from forebay.units_of_measure import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.hardware.profile import Profile
    from forebay.plan.run_record import RunRecord
    from forebay.plan.tiers import TierBytes

__all__ = ["Lesson", "learn"]

# A run that is further off than this was not made on the machine of the profile.
_MOST = 20.0
_NOUNS = {"compute": "computation", "host_update": "the update on the host"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What one run taught.

    Attributes:
        predicted: Seconds that the profile said before.
        measured: Seconds that an update took.
        taught: "compute" or "host_update".
        factor: What it is multiplied by.
        activations: What bytes of activations are multiplied by; None where the run measured no
            peak, as on the CPU.
        peaks: Bytes of the device's peak, predicted and measured.
        drives: What seconds of reads and writes are multiplied by; None where the run had no files
            or the profile has no drives.
    """

    predicted: float
    measured: float
    taught: str
    factor: float
    activations: float | None = None
    peaks: tuple[int, int] = (0, 0)
    drives: float | None = None

    def sentence(self) -> str:
        """The lesson in words."""
        memory = ""
        if self.activations is not None:
            said, took = map(format_bytes, self.peaks)
            memory = (
                f"; predicted {said} on the device, measured {took}: activations take "
                f"{self.activations:.2f} times as much"
            )
        files = ""
        if self.drives is not None:
            files = f"; reads and writes of drives take {self.drives:.2f} times as long"
        noun = _NOUNS[self.taught]
        return (
            f"predicted {format_seconds(self.predicted)} an update, measured "
            f"{format_seconds(self.measured)}: {noun} takes {self.factor:.2f} times as long"
            f"{files}{memory}"
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
    taught = {
        "compute": [one.factor for one in lessons if one.taught == "compute"],
        "host_update": [one.factor for one in lessons if one.taught == "host_update"],
        "activations": [one.activations for one in lessons if one.activations is not None],
        "drives": [one.drives for one in lessons if one.drives is not None],
    }
    factors = {}
    for name, said in taught.items():
        mean = math.exp(sum(map(math.log, said)) / len(said)) if said else 1.0
        factors[name] = getattr(profile.corrections, name) * mean
    corrections = replace(
        profile.corrections, **factors, runs=(profile.corrections.runs or 0) + len(runs)
    )
    return replace(profile, corrections=corrections), lessons


def _lesson(profile: Profile, run: RunRecord) -> Lesson:
    said = run.predict(profile)
    drives = _drives(profile, run)
    if drives is not None:  # what is left of the difference is something else's
        profile = _corrected(profile, "drives", drives)
    forecast = run.forecast(profile)
    if run.streamed_units is None:
        # The same places for every factor that is tried.
        visits = (i for i, place in enumerate(forecast.places) if place is UpdatePlace.STREAMED)
        run = replace(run, streamed_units=tuple(visits))
    rest = forecast.seconds - forecast.compute_seconds
    taught = "compute" if forecast.compute_seconds >= rest else "host_update"
    measured = run.measured.seconds
    low, high = 1 / _MOST, _MOST
    least, most = (_with(profile, run, taught, factor) for factor in (low, high))
    if not least <= measured <= most:
        raise ConfigError(
            f"the run took {measured:.3g} s an update and {forecast.seconds:.3g} s were predicted: "
            f"{_NOUNS[taught]} {_MOST:.3g} times as fast or as slow makes it {least:.3g} to "
            f"{most:.3g} s",
            hint="measure this machine again with: forebay probe --output FILE",
        )
    for _ in range(40):
        middle = math.sqrt(low * high)
        if _with(profile, run, taught, middle) < measured:
            low = middle
        else:
            high = middle
    return Lesson(
        predicted=said,
        measured=measured,
        drives=drives,
        taught=taught,
        factor=math.sqrt(low * high),
        **_memory(profile, run),
    )


def _drives(profile: Profile, run: RunRecord) -> float | None:
    """How many times as long as the profile says a run's files took."""
    use, drives = run.measured.drives, profile.corrected_drives
    if use is None or drives is None or not use.bytes_read + use.bytes_written:
        return None
    factor = use.times_as_long(drives, sharers=run.setup.cluster.devices_per_node)
    if not 1 / _MOST <= factor <= _MOST:
        raise ConfigError(
            f"the run's reads and writes took {factor:.3g} times as long as the profile's drives "
            f"take; that is not between {1 / _MOST:.3g} and {_MOST:.3g}",
            hint="measure the drive of the run's nvme_path again with: forebay probe --drive "
            "FOLDER --output FILE",
        )
    return factor


def _memory(profile: Profile, run: RunRecord) -> dict[str, Any]:
    """What a run says of activations: the factor at which the forecast peak is the measured one."""
    peak = run.measured.device_peak_bytes
    if peak is None:
        return {}

    def said(factor: float) -> TierBytes:
        corrected = factor * profile.corrections.activations
        return tier_bytes(run.shape, run.setup, corrected=corrected, places=run.places)

    predicted, placed = said(1.0).total("device"), said(1.0).placed_on_device
    low, high = 1 / _MOST, _MOST
    if not said(low).total("device") <= peak <= said(high).total("device"):
        raise ConfigError(
            f"the run held {format_bytes(peak)} on the device and {format_bytes(predicted)} were "
            f"predicted, of which {format_bytes(placed)} are placed: no factor of activations "
            f"between {low:.3g} and {high:.3g} makes them the same",
            hint="the run trained another model than its record says",
        )
    for _ in range(40):
        middle = math.sqrt(low * high)
        if said(middle).total("device") < peak:
            low = middle
        else:
            high = middle
    return {"activations": math.sqrt(low * high), "peaks": (predicted, peak)}


def _with(profile: Profile, run: RunRecord, name: str, factor: float) -> float:
    return run.predict(_corrected(profile, name, factor))


def _corrected(profile: Profile, name: str, factor: float) -> Profile:
    changed = {name: getattr(profile.corrections, name) * factor}
    return replace(profile, corrections=replace(profile.corrections, **changed))
