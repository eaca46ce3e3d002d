"""Whether a setup fits a machine, with which micro-batch, and what is missing where it does not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forebay.plan.placement import AccumulationOrder
from forebay.plan.setup import Home
from forebay.plan.tiers import Capacity, TierBytes, capacity, in_engine, tier_bytes
from forebay.plan.ways import setups

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from forebay.plan.setup import Setup
    from forebay.plan.ways import Question
    from forebay.plan.workload import Workload

__all__ = ["Divided", "divided", "fits", "is_feasible", "lack", "lacking_least", "lacks"]

_MIB = 1 << 20
# Elements; more than any model has.
_ALL_WEIGHTS = 10**15


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """A setup with the division of an update into micro-batches that suits the machine.

    Attributes:
        setup: The setup, its workload divided.
        tiers: What it takes.
        short: Bytes that are missing by tier; empty where it fits.
    """

    setup: Setup
    tiers: TierBytes
    short: Mapping[str, int]


def divided(question: Question, setup: Setup) -> Divided:
    """With the largest micro-batch that fits where that is free; else with what lacks least."""
    profile = question.profile
    limits = capacity(profile)
    shared = Home.HOST if profile.machine.device == "cpu" else Home.DEVICE
    found = None
    for work in _divisions(question, setup.workload):
        tried = replace(setup, workload=work)
        tiers = tier_bytes(question.shape, tried, corrected=profile.corrections.activations)
        one = Divided(setup=tried, tiers=tiers, short=fits(tiers, limits, shared=shared))
        if not one.short:
            return _with_memory_used(question, one, left=limits.host - _beside(tiers, shared))
        if found is None or lack(one.short, limits) < lack(found.short, limits):
            found = one
    assert found is not None
    return found


def _beside(tiers: TierBytes, shared: Home) -> int:
    """What of the host's memory is the device's."""
    return tiers.total("device") if shared is Home.HOST else 0


def _with_memory_used(question: Question, one: Divided, *, left: int) -> Divided:
    """With what host memory has room for in memory, where state is on drives."""
    if one.setup.optimizer is not Home.NVME or not in_engine(one.setup):
        return one
    setup = replace(one.setup, host_budget=left // _MIB * _MIB, weights_in_memory=_ALL_WEIGHTS)
    corrected = question.profile.corrections.activations
    return replace(one, setup=setup, tiers=tier_bytes(question.shape, setup, corrected=corrected))


def lacking_least(question: Question) -> Divided:
    """Of all ways the one that fits, or else the one that lacks least; no seconds are asked for."""
    limits = capacity(question.profile)
    ways = (divided(question, setup) for setup in setups(question))
    return min(ways, key=lambda one: lack(one.short, limits))


def lacks(question: Question) -> float:
    """How many times what the machine has its nearest way lacks; 0 where one fits."""
    return lack(lacking_least(question).short, capacity(question.profile))


def is_feasible(question: Question) -> bool:
    """Whether some way fits."""
    return any(not divided(question, setup).short for setup in setups(question))


def lack(short: Mapping[str, int], limits: Capacity) -> float:
    """How many times what a machine has is missing: bytes of a device are not those of a drive."""
    has = {"device": limits.device, "host": limits.host, "nvme": limits.nvme}
    return sum(nbytes / max(1, has[tier]) for tier, nbytes in short.items())


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
