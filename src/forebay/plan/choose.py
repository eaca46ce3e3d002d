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
from forebay.plan.residents import resident_places
from forebay.plan.setup import FOREBAY, Habits, Home, Setup
from forebay.plan.step import StepForecast, step_forecast
from forebay.plan.tiers import Capacity, TierBytes, capacity, in_engine, tier_bytes
from forebay.plan.ways import setups
from forebay.plan.words import TIERS
from forebay.units_of_measure import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.plan.feasible import Divided
    from forebay.plan.ways import Question, Way


__all__ = ["Candidate", "Choice", "Verdict", "choose", "evaluate"]

# A setup that is later in the order must save this share of a step.
_CLEARLY = 0.05
# Of a device, for state that stays there: it cannot make room when activations are larger than
# foretold, as state that visits does.
_RESIDENT_SHARE = 0.9
# A step this much longer than its computation has something to gain; less than this is no gain.
_HIDDEN = 1.02
_GAIN = 0.01


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
    step = _with_residents(question, found)
    return Candidate(
        setup=found.setup,
        tiers=_with_places(question, found.setup, step) or found.tiers,
        step=step,
        short={},
        verdict=Verdict.NOT_NEEDED,
        reason="",
    )


def _with_residents(question: Question, found: Divided) -> StepForecast:
    """The step, with state that stays on the device where that is faster than any that visits."""
    setup, profile = found.setup, question.profile
    step = step_forecast(question.shape, setup, profile=profile)
    is_bound = step.seconds > _HIDDEN * step.compute_seconds
    if setup.optimizer is Home.DEVICE or not in_engine(setup) or not is_bound:
        return step
    if profile.machine.device == "cpu":
        return step
    usable = int(_RESIDENT_SHARE * capacity(profile).device)
    free = usable - found.tiers.total("device")
    places = resident_places(question.shape, setup, free=free)
    if UpdatePlace.DEVICE not in places:
        return step
    other = step_forecast(question.shape, setup, profile=profile, places=places)
    is_better = other.seconds < step.seconds * (1 - _GAIN)
    return other if is_better and _with_places(question, setup, other) else step


def _with_places(question: Question, setup: Setup, step: StepForecast) -> TierBytes | None:
    """What a setup takes with the places that its step has; None where that is more than is."""
    if all(place is UpdatePlace.HOST for place in step.places):
        return None
    corrected = question.profile.corrections.activations
    found = tier_bytes(question.shape, setup, corrected=corrected, places=step.places)
    return found if not fits(found, capacity(question.profile)) else None


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
    tried: list[Candidate] = []
    for setup in setups(question, habits=habits, among=among):
        # layer order moves less; where computation is all there is, that gains nothing
        is_layer = setup.workload.order is AccumulationOrder.LAYER
        if not is_layer or all(_is_bound(one) for one in tried):
            tried.append(evaluate(question, setup))
    fastest = min((one.seconds for one in tried), default=float("inf"))
    best = next((one for one in tried if one.step and _as_fast(one, fastest)), None)
    judged = tuple(_judged(one, tried=tried, best=best, question=question) for one in tried)
    chosen = next((one for one in judged if one.verdict is Verdict.RECOMMENDED), None)
    return Choice(question=question, capacity=capacity(question.profile), best=chosen, all=judged)


def _is_bound(one: Candidate) -> bool:
    """Whether a step waits for anything but computation, or does not fit."""
    return one.step is None or one.seconds > _HIDDEN * one.step.compute_seconds


def _as_fast(one: Candidate, fastest: float) -> bool:
    return one.seconds * (1 - _CLEARLY) <= fastest


def _judged(
    one: Candidate, *, tried: Sequence[Candidate], best: Candidate | None, question: Question
) -> Candidate:
    if one.short:
        limits = capacity(question.profile)
        words = ", ".join(
            f"{TIERS[tier]} would need {format_bytes(getattr(limits, tier) + short)} "
            f"and has {format_bytes(getattr(limits, tier))}"
            for tier, short in one.short.items()
        )
        return replace(one, reason=words)
    assert best is not None
    if one is best:
        return replace(one, verdict=Verdict.RECOMMENDED, reason=_why(one, tried))
    if one.setup.optimizer is Home.NVME and not one.tiers.total("nvme"):
        return replace(
            one, reason="fits, but host memory holds all of the state: drives would stay empty"
        )
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


def _why(one: Candidate, tried: Sequence[Candidate]) -> str:
    """Why a candidate is the one: nothing before it fits, or it is clearly faster."""
    setup = one.setup
    before = [other.seconds for other in tried[: list(tried).index(one)] if other.step]
    if before:
        return f"saves {1 - one.seconds / min(before):.0%} of a step against those that move less"
    if setup.optimizer is Home.DEVICE:
        return "everything fits on the devices, and nothing is clearly faster"
    if setup.weights is Home.DEVICE:
        return "optimizer state does not fit on the devices, weights and activations do"
    if setup.optimizer is Home.HOST:
        words = "not even the weights fit on the devices beside activations"
        if setup.workload.order is AccumulationOrder.LAYER:
            words += "; in layer order they move once an update"
        return words
    if not one.tiers.total("nvme"):
        return "host memory is too small for all of the state; the devices hold the rest"
    return "host memory is too small for all of the state; drives hold the rest"
