"""ZenFlow's operations on one unit, once warm-up is over: what a step does, and what an interval.

Extra updates of the rest before columns are chosen anew are not in it: choices are rare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.plan.ops import Lane, Op, OpKind, Trigger, TriggerKind
from forebay.plan.unit_bytes import unit_bytes, whole_bytes
from forebay.plan.zenflow import ZenFlow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.plan.placement import Placement, UnitPlacement

__all__ = ["zenflow_ops"]

# Master and two moments in fp32, each way.
_STATE_BYTES = 2 * 12


def zenflow_ops(
    unit: UnitPlacement, placement: Placement, *, after: tuple[int, ...], first: int
) -> Iterator[Op]:
    """Important columns and gathering in every step; the rest's update once in an interval.

    Args:
        unit: A unit that updates on the host.
        placement: Its policy is `ZenFlow`.
        after: What the step's update waits for.
        first: The number in the program that the first of these gets.
    """
    policy = placement.policy
    assert isinstance(policy, ZenFlow)
    index, step = unit.layout.index, Trigger(TriggerKind.STEP)
    moved = 0
    if policy.keeps_state_on_host:
        moved = round(policy.topk_ratio * unit_bytes(unit, placement, _STATE_BYTES))
    yield Op(
        kind=OpKind.IMPORTANT,
        lane=Lane.COMPUTE,
        unit=index,
        nbytes=moved,
        after=after,
        trigger=step,
    )
    yield Op(kind=OpKind.GATHER_REST, lane=Lane.HOST, unit=index, after=after, trigger=step)
    update, publish = first + 2, first + 3
    yield Op(
        kind=OpKind.UPDATE,
        lane=Lane.HOST,
        unit=index,
        after=(first + 1,),
        trigger=step,
        every=policy.interval,
    )
    # with overlap what comes into force is what the interval before has updated
    yield Op(
        kind=OpKind.PUBLISH,
        lane=Lane.UP,
        unit=index,
        nbytes=unit_bytes(unit, placement),
        after=() if policy.overlaps else (update,),
        after_last=(update,) if policy.overlaps else (),
        trigger=step,
        every=policy.interval,
    )
    if placement.gathers_weights:
        # important columns are new in every step
        yield Op(
            kind=OpKind.GATHER,
            lane=Lane.RANKS,
            unit=index,
            nbytes=whole_bytes(unit),
            after=(first, publish),
            trigger=step,
        )
