"""Which setup to recommend: few dozens are tried, all are kept with the reason why not.

The order of choice: nothing offloaded, in the lowest stage that fits; optimizer state and gradients
to the host; weights too; drives last. A later setup is taken only where it is clearly faster. For
each setup the largest micro-batch that fits comes first: fewer passes, same update.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from forebay.errors import ConfigError
from forebay.plan.feasible import divided, fits, lack
from forebay.plan.placement import AccumulationOrder, UpdatePlace
from forebay.plan.setup import FOREBAY, Habits, Home, Setup
from forebay.plan.step import StepForecast, step_forecast
from forebay.plan.tiers import Capacity, TierBytes, capacity, tier_bytes
from forebay.plan.ways import setups
from forebay.units_of_measure import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.plan.ways import Question, Way


__all__ = ["Candidate", "Choice", "Verdict", "choose", "evaluate"]

# A setup that is later in the order must save this share of a step.
_CLEARLY = 0.05


class Verdict(Enum):
    """What became of a candidate."""

    RECOMMENDED = "recommended"
    """This one."""
    TOO_LARGE = "does not fit"
    """A tier is short."""
    SLOWER = "slower"
    """It fits, and takes longer."""
    NOT_NEEDED = "not needed"
    """It fits and is about as fast, and moves more than the one that was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One setup with its forecasts.

    Attributes:
        setup: The setup.
        tiers: What it takes.
        step: How long it takes; None where it does not fit.
        short: Bytes that are missing by tier.
        verdict: What became of it.
        reason: Why, in words.
    """

    setup: Setup
    tiers: TierBytes
    step: StepForecast | None
    short: dict[str, int]
    verdict: Verdict
    reason: str

    @property
    def seconds(self) -> float:
        """Of one update; infinite where it does not fit."""
        return self.step.seconds if self.step else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The answer.

    Attributes:
        question: What was asked.
        capacity: What each tier can give.
        best: The recommended candidate; None where nothing fits.
        all: Every candidate, in the order of choice.
    """

    question: Question
    capacity: Capacity
    best: Candidate | None
    all: tuple[Candidate, ...]

    @property
    def nearest(self) -> Candidate:
        """Where nothing fits: the candidate that lacks least."""
        return min(self.all, key=lambda one: lack(one.short, self.capacity))


def evaluate(question: Question, setup: Setup) -> Candidate:
    """Forecast one setup, with the largest micro-batch that fits where that is free."""
    profile = question.profile
    if profile.node is None:
        raise ConfigError(
            "the profile has no capacities to plan with: it was written by an earlier probe",
            hint="measure this machine with: forebay probe --output FILE",
        )
    found = divided(question, setup)
    if found.short:
        return Candidate(
            setup=found.setup,
            tiers=found.tiers,
            step=None,
            short=dict(found.short),
            verdict=Verdict.TOO_LARGE,
            reason="",
        )
    step = step_forecast(question.shape, found.setup, profile=profile)
    return Candidate(
        setup=found.setup,
        tiers=_with_visits(question, found.setup, step, found.tiers),
        step=step,
        short={},
        verdict=Verdict.NOT_NEEDED,
        reason="",
    )


def _with_visits(
    question: Question, setup: Setup, step: StepForecast, tiers: TierBytes
) -> TierBytes:
    """What a setup takes with the state that visits, which takes no more than there is."""
    if UpdatePlace.STREAMED not in step.places:
        return tiers
    corrected = question.profile.corrections.activations
    found = tier_bytes(question.shape, setup, corrected=corrected, places=step.places)
    return found if not fits(found, capacity(question.profile)) else tiers


def choose(
    question: Question,
    *,
    habits: Habits = FOREBAY,
    among: Sequence[Way] | None = None,
) -> Choice:
    """Try every setup and recommend one.

    Args:
        question: What is to be planned.
        habits: Whose system.
        among: What to try, in the order of choice; None for all.

    Raises:
        ConfigError: The profile has no capacities, or no rate for the precision.
    """
    asked = setups(question, habits=habits, among=among)
    tried = [evaluate(question, setup) for setup in asked]
    fastest = min((one.seconds for one in tried), default=float("inf"))
    best = next((one for one in tried if one.step and _as_fast(one, fastest)), None)
    judged = tuple(_judged(one, best=best, limits=capacity(question.profile)) for one in tried)
    chosen = next((one for one in judged if one.verdict is Verdict.RECOMMENDED), None)
    return Choice(question=question, capacity=capacity(question.profile), best=chosen, all=judged)


def _as_fast(one: Candidate, fastest: float) -> bool:
    return one.seconds * (1 - _CLEARLY) <= fastest


def _judged(one: Candidate, *, best: Candidate | None, limits: Capacity) -> Candidate:
    if one.short:
        words = ", ".join(
            f"{_TIERS[tier]} would need {format_bytes(getattr(limits, tier) + short)} of "
            f"{format_bytes(getattr(limits, tier))}"
            for tier, short in one.short.items()
        )
        return replace(one, reason=words)
    assert best is not None
    if one is best:
        return replace(one, verdict=Verdict.RECOMMENDED, reason=_why(one))
    ratio = one.seconds / best.seconds
    if ratio > 1 + _CLEARLY:
        return replace(
            one,
            verdict=Verdict.SLOWER,
            reason=f"fits, but a step takes {ratio:.2f} times as long",
        )
    words = "fits and is about as fast, but moves more"
    if ratio < 1 - _CLEARLY / 2:
        words = f"fits and saves {1 - ratio:.0%} of a step, but moves more"
    return replace(one, verdict=Verdict.NOT_NEEDED, reason=words)


_TIERS = {"device": "each device", "host": "each host", "nvme": "each node's drives"}


def _why(one: Candidate) -> str:
    setup = one.setup
    if setup.optimizer is Home.DEVICE:
        return "everything fits on the devices, and nothing is faster"
    if setup.weights is Home.DEVICE:
        return "optimizer state does not fit on the devices, weights and activations do"
    if setup.optimizer is Home.HOST:
        words = "not even the weights fit on the devices beside activations"
        if setup.workload.order is AccumulationOrder.LAYER:
            words += "; in layer order they move once an update"
        return words
    return "host memory is too small for the state; drives hold it"
