"""ZenFlow on the simulator's clock: what every step does, and what an interval does once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.plan.op_costs import OpCosts
from forebay.plan.placement import Accumulation
from forebay.plan.policies import Delayed, Speculative
from forebay.plan.program import Lane, OpKind, build_program
from forebay.plan.setup import Home, Setup
from forebay.plan.simulate import ComputeSeconds, simulate
from forebay.plan.solve import Rates
from forebay.plan.tiers import placement_of
from forebay.plan.workload import Workload
from forebay.plan.zenflow import ZenFlow
from plan_cases import LLAMA_3B, question

SHAPE = question(LLAMA_3B | {"num_hidden_layers": 6}, "h200").shape
SETUP = Setup(stage=2, optimizer=Home.HOST, weights=Home.DEVICE, workload=Workload())
EXACT = placement_of(SHAPE, SETUP)
# The host's update takes several times what computation takes.
RATES = Rates(host_memory=40e9, link_up=25e9, link_down=25e9)
COUNT = len(EXACT.units)
COMPUTE = ComputeSeconds(forward=(0.01,) * COUNT, backward=(0.02,) * COUNT)


def _simulated(policy):
    placement = replace(EXACT, policy=policy)
    program = build_program(placement, order=range(COUNT))
    return program, simulate(
        program, placement=placement, rates=RATES, compute=COMPUTE, order=range(COUNT)
    )


def test_an_interval_has_one_update_of_the_rest_and_one_publication():
    interval = 4
    program, found = _simulated(ZenFlow(update_every=interval))
    assert program.period == interval
    windows = {kind: [one.window for one in found.ops if one.op.kind is kind] for kind in OpKind}
    assert set(windows[OpKind.IMPORTANT]) == set(range(2 * interval + 1))
    assert set(windows[OpKind.UPDATE]) == {interval - 1, 2 * interval - 1}
    assert windows[OpKind.PUBLISH] == windows[OpKind.UPDATE]
    exact, _ = _simulated(EXACT.policy)
    assert program.traffic(Lane.DOWN) == exact.traffic(Lane.DOWN)
    assert program.traffic(Lane.UP) == pytest.approx(exact.traffic(Lane.UP) / interval, abs=COUNT)


def test_steps_get_shorter_by_the_updates_that_they_do_without():
    _, exact = _simulated(EXACT.policy)
    _, few = _simulated(ZenFlow(update_every=4))
    _, fewer = _simulated(ZenFlow(update_every=8))
    computed = sum(COMPUTE.forward) + sum(COMPUTE.backward)
    assert computed < fewer.step_seconds < few.step_seconds < exact.step_seconds
    # gathering reads a gradient and reads and writes a sum: 10 bytes a parameter, an update 28
    gathered = 10 * SHAPE.parameters / RATES.host_memory
    assert few.step_seconds > gathered


def test_with_overlap_the_rest_comes_into_force_an_interval_later():
    interval = 4
    _, found = _simulated(ZenFlow(update_every=interval, overlaps=True))
    _, waits = _simulated(ZenFlow(update_every=interval))
    assert found.step_seconds < waits.step_seconds
    updated = {one.op.unit: one.end for one in found.ops if one.op.kind is OpKind.UPDATE
               and one.window == interval - 1}  # fmt: skip
    shown = {one.op.unit: one.begin for one in found.ops if one.op.kind is OpKind.PUBLISH
             and one.window == 2 * interval - 1}  # fmt: skip
    assert all(updated[unit] <= shown[unit] for unit in range(COUNT))


def test_state_that_is_on_the_host_between_steps_crosses_the_link_for_its_share():
    program, _ = _simulated(ZenFlow(topk_ratio=0.25, keeps_state_on_host=True))
    moved = sum(op.nbytes for op in program.ops if op.kind is OpKind.IMPORTANT)
    assert moved == pytest.approx(0.25 * 24 * SHAPE.parameters, rel=1e-6)


@pytest.mark.parametrize(
    ("accumulation", "policy", "bytes_of_one"),
    [
        (Accumulation.SINGLE, EXACT.policy, 26),
        (Accumulation.DEVICE_SUM, EXACT.policy, 28),
        # a delayed update leaves new weights over the gradient, whatever the master
        (Accumulation.SINGLE, Delayed(), 26),
        # lines of a second state are read before they are written
        (Accumulation.SINGLE, Speculative(), 38),
    ],
)
def test_an_update_on_the_host_reads_the_gradient_that_is_there(accumulation, policy, bytes_of_one):
    placement = replace(EXACT, accumulation=accumulation, policy=policy)
    costs = OpCosts(placement, rates=RATES)
    updates = [
        op for op in build_program(placement, order=range(COUNT)).ops if op.kind is OpKind.UPDATE
    ]
    work = sum(costs.task(op, ()).work for op in updates)
    assert work == bytes_of_one * SHAPE.parameters
