"""ZeRO stages and offloads side by side: memory, step seconds, and how they scale over nodes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forebay.plan.choose import Candidate, choose, evaluate
from forebay.plan.setup import Setup
from forebay.plan.ways import Way, candidates
from forebay.plan.words import TIERS, in_words
from forebay.units_of_measure import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from forebay.plan.choose import Choice
    from forebay.plan.setup import Cluster
    from forebay.plan.ways import Question

__all__ = ["Comparison", "ScalingPoint", "comparison"]

# The curve's points: this many nodes and twice, four, eight times as many.
_DOUBLINGS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """One setup on a cluster.

    Attributes:
        devices: All of them.
        tokens_per_second: Of all; None where it does not fit.
    """

    devices: int
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All setups side by side.

    Attributes:
        choice: Each with its forecasts.
        curves: Tokens per second over growing clusters by setup, with the same batch a device.
    """

    choice: Choice
    curves: dict[str, tuple[ScalingPoint, ...]]

    @property
    def title(self) -> str:
        """What is compared: the model, the machine and an update, in one line."""
        question = self.choice.question
        cluster, work = question.cluster, question.workload
        share = work.micro_batch * work.accumulation
        batch = share * cluster.devices // work.tensor_parallel
        nodes = f" in {cluster.nodes} nodes" if cluster.nodes > 1 else ""
        return (
            f"{in_words(question.shape.parameters)} parameters on "
            f"{counted(cluster.devices, 'device')} ({question.profile.machine.device}){nodes}, "
            f"{batch:,} x {work.sequence:,} tokens an update"
        )

    def as_text(self) -> str:
        """The table."""
        head = (
            f"{'way to train':<59}{'each device':>12}{'each host':>11}{'drives':>11}{'update':>12}"
            f"{'tokens/s':>12}  pace set by"
        )
        lines = [self.title, "", head]
        for one in self.choice.all:
            mark = "->" if one is self.choice.best else "  "
            label = f"{mark} {one.setup.label:<56}"
            bytes_of = [one.tiers.total(tier) for tier in ("device", "host", "nvme")]
            cells = " " + "".join(
                f"{format_bytes(nbytes) if nbytes else '-':>11}" for nbytes in bytes_of
            )
            if one.step is None:
                short = " and ".join(
                    f"{format_bytes(lack)} on {TIERS[tier]}" for tier, lack in one.short.items()
                )
                lines.append(f"{label}{cells}{'-':>12}{'-':>12}  does not fit: lacks {short}")
                continue
            pace = _pace(one, self.choice.question.cluster)
            lines.append(
                f"{label}{cells}{format_seconds(one.seconds):>12}{pace:>12,.0f}  {one.step.bound}"
            )
        lines += ["", "tokens per second on more devices, same batch on each:"]
        devices = [point.devices for point in next(iter(self.curves.values()))]
        lines.append(f"{'way to train':<59}" + "".join(f"{count:>12,}" for count in devices))
        for label, points in self.curves.items():
            cells = "".join(
                f"{'-':>12}"
                if point.tokens_per_second is None
                else f"{point.tokens_per_second:>12,.0f}"
                for point in points
            )
            lines.append(f"   {label:<56}{cells}")
        lines += ["", "-> is what forebay plan recommends, and explains without --compare."]
        return "\n".join(lines) + "\n"

    def as_json(self) -> str:
        """The same as JSON."""
        rows: list[dict[str, Any]] = []
        for one in self.choice.all:
            step = one.step
            rows.append(
                {
                    "setup": one.setup.label,
                    "device_bytes": one.tiers.total("device"),
                    "host_bytes": one.tiers.total("host"),
                    "nvme_bytes": one.tiers.total("nvme"),
                    "short_bytes": one.short,
                    "seconds": step.seconds if step else None,
                    "bound": step.bound if step else None,
                    "scaling": [
                        {"devices": p.devices, "tokens_per_second": p.tokens_per_second}
                        for p in self.curves[one.setup.label]
                    ],
                }
            )
        return json.dumps(rows, indent=2) + "\n"


def comparison(question: Question) -> Comparison:
    """Compare every setup."""
    choice = choose(question)
    curves: dict[str, tuple[ScalingPoint, ...]] = {}
    for one in choice.all:
        points = []
        for doubling in range(_DOUBLINGS):
            cluster = replace(question.cluster, nodes=question.cluster.nodes << doubling)
            points.append(_point(question, one, cluster))
        curves[one.setup.label] = tuple(points)
    return Comparison(choice=choice, curves=curves)


def _point(question: Question, one: Candidate, cluster: Cluster) -> ScalingPoint:
    wider = replace(question, cluster=cluster)
    way = Way.of(one.setup)
    if way not in candidates(cluster, drives=True):
        return ScalingPoint(devices=cluster.devices, tokens_per_second=None)
    setup = Setup(
        stage=way.stage,
        optimizer=way.optimizer,
        weights=way.weights,
        workload=replace(question.workload, order=way.order),
        cluster=cluster,
    )
    found = one if cluster == question.cluster else evaluate(wider, setup)
    return ScalingPoint(
        devices=cluster.devices,
        tokens_per_second=_pace(found, cluster) if found.step else None,
    )


def _pace(one: Candidate, cluster: Cluster) -> float:
    devices = cluster.devices // one.setup.workload.tensor_parallel
    return one.setup.workload.tokens_per_update * devices / one.seconds
