"""A published figure beside the planner's, and what all rows share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from forebay.hardware.catalog import CATALOG
from forebay.plan.compute import model_flops
from forebay.plan.model_config import from_counts
from forebay.plan.setup import FOREBAY, Cluster, Habits, Home, Setup
from forebay.plan.step import StepForecast, step_forecast
from forebay.plan.tiers import capacity, tier_bytes
from forebay.plan.workload import Attention, Precision, Recompute, Workload

if TYPE_CHECKING:
    from forebay.model.shape import ModelShape

V100 = CATALOG["v100-32"]
# One convention for all rows of 2020 and 2021: fp16, sequences of 1024, scores in memory, blocks
# recomputed, as the papers say; four sequences on a device where they give no batch.
WORK = Workload(micro_batch=4, sequence=1024, precision=Precision.FP16, attention=Attention.EAGER)
# What ZeRO-Infinity calls the achievable peak of a V100; 32 bytes of state traffic per parameter.
PEAK = 70e12


class Kind(Enum):
    """What a row holds, and how far off it may be."""

    EXACT = 0.001
    CAPACITY = 0.10
    THROUGHPUT = 0.30
    ORDERING = 0.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure.

    Attributes:
        name: What it is.
        published: As published; for orderings, what holds.
        predicted: The planner's, or whether the ordering holds.
        kind: What it may differ by.
        unit: Of both.
        note: How it comes about.
    """

    name: str
    published: float | str
    predicted: float | bool
    kind: Kind
    unit: str = ""
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether the row is within what its kind allows."""
        if isinstance(self.published, str):
            return bool(self.predicted)
        return abs(self.predicted / self.published - 1) <= self.kind.value + 1e-9


def setup_of(
    stage: int,
    optimizer: Home = Home.DEVICE,
    weights: Home = Home.DEVICE,
    *,
    work: Workload = WORK,
    cluster: tuple[int, int] = (1, 1),
    habits: Habits = FOREBAY,
) -> Setup:
    """A setup on (devices of a node, nodes)."""
    return Setup(
        stage=stage,
        optimizer=optimizer,
        weights=weights,
        workload=work,
        cluster=Cluster(devices_per_node=cluster[0], nodes=cluster[1]),
        habits=habits,
    )


def state_bytes(shape: ModelShape, setup: Setup) -> int:
    """Weights, gradients and state on a device: one token, nothing in passing."""
    setup = replace(setup, workload=replace(setup.workload, micro_batch=1, sequence=1))
    device = tier_bytes(shape, setup).device
    return sum(size for role, size in device.items() if role not in ("activations", "staging"))


def fits(shape: ModelShape, setup: Setup) -> bool:
    """On V100s."""
    limits, tiers = capacity(V100), tier_bytes(shape, setup)
    names = ("device", "host", "nvme")
    return all(tiers.total(tier) <= getattr(limits, tier) for tier in names)


def largest(setup: Setup) -> float:
    """The most parameters, in billions, that fit on V100s."""
    low, high = 1e8, 1e13
    while high / low > 1.005:
        middle = (low * high) ** 0.5
        if fits(from_counts(round(middle)), setup):
            low = middle
        else:
            high = middle
    return low / 1e9


def step_of(shape: ModelShape, setup: Setup) -> StepForecast:
    """On V100s."""
    return step_forecast(shape, setup, profile=V100)


def tflops(shape: ModelShape, setup: Setup) -> float:
    """Of one device: 6 operations for a parameter and token, what is computed again not counted."""
    once = replace(setup.workload, recompute=Recompute.NONE)
    return model_flops(shape, once) / step_of(shape, setup).seconds / 1e12
