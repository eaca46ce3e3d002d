"""What is asked, and what is tried for it: all setups in the order of choice.

Nothing offloaded comes first, in the lowest stage; then optimizer state and gradients on the host;
weights too; drives last. Values alone: nothing is forecast here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from forebay.plan.placement import AccumulationOrder
from forebay.plan.setup import FOREBAY, Cluster, Habits, Home, Setup

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from forebay.hardware.profile import Profile
    from forebay.model.shape import ModelShape
    from forebay.plan.workload import Workload

__all__ = ["Question", "Way", "candidates", "setups"]


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
    """What is tried, in the order of choice.

    Layer order follows the usual one where weights come and go: over links, or between ranks.
    """
    several = cluster.devices > 1
    yield Way(0, Home.DEVICE, Home.DEVICE)
    if several:
        for stage in (1, 2):
            yield Way(stage, Home.DEVICE, Home.DEVICE)
        yield from _in_both_orders(Way(3, Home.DEVICE, Home.DEVICE))
    yield Way(2, Home.HOST, Home.DEVICE)
    if several:
        yield from _in_both_orders(Way(3, Home.HOST, Home.DEVICE))
    yield from _in_both_orders(Way(3, Home.HOST, Home.HOST))
    if drives:
        yield Way(3, Home.NVME, Home.DEVICE)
        yield from _in_both_orders(Way(3, Home.NVME, Home.HOST))
        yield from _in_both_orders(Way(3, Home.NVME, Home.NVME))


def _in_both_orders(way: Way) -> Iterator[Way]:
    yield way
    yield way._replace(order=AccumulationOrder.LAYER)


def _has_order(question: Question) -> bool:
    """Whether an update may have several micro-batches, which pass in one order or another."""
    work = question.workload
    if question.free_micro_batch is None:
        return work.accumulation > 1
    return work.micro_batch * work.accumulation > 1


def setups(
    question: Question, *, habits: Habits = FOREBAY, among: Sequence[Way] | None = None
) -> Iterator[Setup]:
    """All that is tried, in the order of choice."""
    for way in among or candidates(question.cluster, drives=question.profile.drives is not None):
        if way.order is AccumulationOrder.MICROBATCH or _has_order(question):
            yield Setup(
                stage=way.stage,
                optimizer=way.optimizer,
                weights=way.weights,
                workload=replace(question.workload, order=way.order),
                cluster=question.cluster,
                habits=habits,
            )
