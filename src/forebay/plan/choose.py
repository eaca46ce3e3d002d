"""Which setup to recommend: few dozens are tried, all are kept with the reason why not.

The order of choice: nothing offloaded, in the lowest stage that fits; optimizer state and gradients
to the host; weights too; drives last. A later setup is taken only where it is clearly faster. For
each setup the largest micro-batch that fits comes first: fewer passes, same update.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from forebay.errors import ConfigError
from forebay.plan.placement import AccumulationOrder, UpdatePlace
from forebay.plan.setup import FOREBAY, Cluster, Habits, Home, Setup
from forebay.plan.step import StepForecast, step_forecast
from forebay.plan.tiers import Capacity, TierBytes, capacity, tier_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from forebay.hardware.profile import Profile
    from forebay.model.shape import ModelShape
    from forebay.plan.workload import Workload

__all__ = [
    "Candidate",
    "Choice",
    "Question",
    "Verdict",
    "Way",
    "candidates",
    "choose",
    "evaluate",
    "fits",
]

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
class Question:
    """What is to be planned.

    Attributes:
        shape: The model.
        profile: Each node.
        cluster: Devices and nodes.
        workload: Its `micro_batch` times `accumulation` is each device's share of an update.
        free_micro_batch: Whether the planner may divide that share: the largest micro-batch it may
            choose; None keeps the workload's.
        has_devices: Devices that the machine has as it is; None where nobody asked for others.
        names_units: Whether the shape is a model's own, not made from a count: then a
            configuration may name its units.
    """

    shape: ModelShape
    profile: Profile
    cluster: Cluster
    workload: Workload
    free_micro_batch: int | None = None
    has_devices: int | None = None
    names_units: bool = False


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
        return min(self.all, key=lambda one: sum(one.short.values()))


class Way(NamedTuple):
    """What a setup is beside its work and its machine.

    Attributes:
        stage: ZeRO's.
        optimizer: Where masters and moments live.
        weights: Where working weights live.
        order: In which order micro-batches pass the model.
    """

    stage: int
    optimizer: Home
    weights: Home
    order: AccumulationOrder = AccumulationOrder.MICROBATCH

    @classmethod
    def of(cls, setup: Setup) -> Way:
        """Of a setup."""
        return cls(setup.stage, setup.optimizer, setup.weights, setup.workload.order)


def candidates(cluster: Cluster, *, drives: bool) -> Iterator[Way]:
    """What is tried, in the order of choice."""
    several = cluster.devices > 1
    layer = AccumulationOrder.LAYER
    yield Way(0, Home.DEVICE, Home.DEVICE)
    if several:
        for stage in (1, 2, 3):
            yield Way(stage, Home.DEVICE, Home.DEVICE)
    yield Way(2, Home.HOST, Home.DEVICE)
    if several:
        yield Way(3, Home.HOST, Home.DEVICE)
    yield Way(3, Home.HOST, Home.HOST)
    if not several:
        yield Way(3, Home.HOST, Home.HOST, layer)
    if drives:
        yield Way(3, Home.NVME, Home.DEVICE)
        yield Way(3, Home.NVME, Home.HOST)
        if not several:
            yield Way(3, Home.NVME, Home.HOST, layer)
        yield Way(3, Home.NVME, Home.NVME)


def fits(tiers: TierBytes, limits: Capacity, *, shared: Home = Home.DEVICE) -> dict[str, int]:
    """Bytes that are missing by tier; empty where it fits.

    Args:
        tiers: What a setup takes.
        limits: What a machine gives.
        shared: `HOST` where the device's memory is the host's, so that both share one limit.
    """
    needs = {tier: tiers.total(tier) for tier in ("device", "host", "nvme")}
    if shared is Home.HOST:
        needs = {"device": 0, "host": needs["device"] + needs["host"], "nvme": needs["nvme"]}
    has = {"device": limits.device, "host": limits.host, "nvme": limits.nvme}
    return {tier: needs[tier] - has[tier] for tier in needs if needs[tier] > has[tier]}


def evaluate(question: Question, setup: Setup) -> Candidate:
    """Forecast one setup, with the largest micro-batch that fits where that is free."""
    profile = question.profile
    if profile.node is None:
        raise ConfigError(
            "the profile has no capacities to plan with: it was written by an earlier probe",
            hint="measure this machine with: forebay probe --output FILE",
        )
    limits = capacity(profile)
    shared = Home.HOST if profile.machine.device == "cpu" else Home.DEVICE
    tried = setup
    for work in _divisions(question, setup.workload):
        tried = replace(setup, workload=work)
        tiers = tier_bytes(question.shape, tried, corrected=profile.corrections.activations)
        short = fits(tiers, limits, shared=shared)
        if not short:
            step = step_forecast(question.shape, tried, profile=profile)
            return Candidate(
                setup=tried,
                tiers=_with_visits(question, tried, step, tiers),
                step=step,
                short={},
                verdict=Verdict.NOT_NEEDED,
                reason="",
            )
    return Candidate(
        setup=tried,
        tiers=tiers,
        step=None,
        short=short,
        verdict=Verdict.TOO_LARGE,
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


def _divisions(question: Question, work: Workload) -> Iterator[Workload]:
    """The device's share of an update, in larger micro-batches first."""
    if question.free_micro_batch is None:
        yield work
        return
    share = work.micro_batch * work.accumulation
    least = 2 if work.order is AccumulationOrder.LAYER else 1
    for size in range(min(share // least, question.free_micro_batch), 0, -1):
        if share % size == 0:
            yield replace(work, micro_batch=size, accumulation=share // size)


def _has_order(question: Question) -> bool:
    """Whether an update may have several micro-batches, which pass in one order or another."""
    work = question.workload
    if question.free_micro_batch is None:
        return work.accumulation > 1
    return work.micro_batch * work.accumulation > 1


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
    tried = [
        evaluate(
            question,
            Setup(
                stage=way.stage,
                optimizer=way.optimizer,
                weights=way.weights,
                workload=replace(question.workload, order=way.order),
                cluster=question.cluster,
                habits=habits,
            ),
        )
        for way in among or candidates(question.cluster, drives=question.profile.drives is not None)
        if way.order is AccumulationOrder.MICROBATCH or _has_order(question)
    ]
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
            f"{_TIERS[tier]} would need {_size(getattr(limits, tier) + short)} of "
            f"{_size(getattr(limits, tier))}"
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


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB"


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
