"""One rank on a clock: no lane works more than a step lasts, and more of anything never hurts."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.plan.rank_step import RankRates, RankUnit, simulate_rank
from forebay.plan.setup import FOREBAY, Cluster, Home, Overlap, Setup
from forebay.plan.timeline import Row
from forebay.plan.workload import Workload

_RATE = st.floats(1e8, 1e12)
_BYTES = st.floats(0, 1e8)
_SECONDS = st.floats(1e-4, 0.05)


@st.composite
def _cases(draw):
    optimizer = draw(st.sampled_from(list(Home)))
    weights = draw(
        st.sampled_from(list(Home)) if optimizer is not Home.DEVICE else st.just(optimizer)
    )
    stage = 3 if weights is not Home.DEVICE else draw(st.integers(0, 3))
    overlap = st.sampled_from(list(Overlap))
    setup = Setup(
        stage=stage,
        optimizer=optimizer,
        weights=weights,
        workload=Workload(accumulation=draw(st.integers(1, 4))),
        cluster=Cluster(devices_per_node=draw(st.sampled_from([1, 8])), nodes=1),
        habits=replace(FOREBAY, collectives=draw(overlap), update=draw(overlap)),
    )
    units = []
    for index in range(draw(st.integers(1, 5))):
        whole, share = draw(_BYTES), setup.ranks if stage else 1
        units.append(
            RankUnit(
                name=f"u{index}",
                forward=draw(_SECONDS),
                backward=draw(_SECONDS),
                weights=whole,
                gradients=whole,
                own_weights=whole / share,
                own_gradients=whole / share,
                update=14 * whole / share,
                state_read=6 * whole / share,
                state_written=6 * whole / share,
            )
        )
    names = [f.name for f in fields(RankRates) if f.name != "latency_seconds"]
    rates = RankRates(**{name: draw(_RATE) for name in names}, latency_seconds=1e-5)
    return units, setup, rates


@settings(max_examples=60, deadline=None)
@given(_cases())
def test_a_step_is_as_long_as_its_busiest_lane(case):
    units, setup, rates = case
    found = simulate_rank(units, setup=setup, rates=rates)
    passes = sum(unit.forward + unit.backward for unit in units)
    assert found.seconds >= setup.workload.accumulation * passes * (1 - 1e-6)
    own = sum(unit.own_gradients for unit in units)
    if setup.optimizer is not Home.DEVICE:
        assert found.seconds >= own / rates.down * (1 - 1e-6)
        assert found.seconds >= sum(unit.update for unit in units) / rates.update * (1 - 1e-6)
    if setup.optimizer is Home.NVME:
        assert found.seconds >= sum(u.state_read for u in units) / rates.read * (1 - 1e-6)
    for row in (Row.COMPUTE, Row.UP, Row.DOWN, Row.RANKS):
        spans = found.timeline.in_row(row)
        assert all(a.end <= b.begin + 1e-9 for a, b in itertools.pairwise(spans))


@settings(max_examples=30, deadline=None)
@given(_cases(), st.floats(1.5, 4))
def test_all_rates_scaled_scale_what_is_not_computation(case, factor):
    """Everything as many times as fast: a step is that much shorter, to the last digit."""
    units, setup, rates = case
    faster = RankRates(
        **{f.name: getattr(rates, f.name) * factor for f in fields(rates)
           if f.name != "latency_seconds"},
        latency_seconds=rates.latency_seconds / factor,
    )  # fmt: skip
    shorter = [replace(u, forward=u.forward / factor, backward=u.backward / factor) for u in units]
    slow = simulate_rank(units, setup=setup, rates=rates).seconds
    fast = simulate_rank(shorter, setup=setup, rates=faster).seconds
    assert fast * factor == pytest.approx(slow, rel=1e-6)


def test_overlap_hides_what_has_room():
    """One rank, plenty of computation: the update beside the next forward costs nothing."""
    unit = RankUnit(
        name="u", forward=1.0, backward=2.0, weights=1e9, gradients=1e9, own_weights=1e9,
        own_gradients=1e9, update=14e9, state_read=0, state_written=0,
    )  # fmt: skip
    rates = RankRates(
        up=1e10, down=1e10, host_memory=1e12, update=1e11, device_update=1e12, read=1e9,
        write=1e9, gather=1e12, latency_seconds=0.0,
    )  # fmt: skip
    setup = Setup(stage=2, optimizer=Home.HOST, weights=Home.DEVICE, workload=Workload())
    after = replace(setup, habits=replace(FOREBAY, update=Overlap.AFTER))
    units = [replace(unit, name=f"u{i}") for i in range(8)]
    beside = simulate_rank(units, setup=setup, rates=rates).seconds
    waiting = simulate_rank(units, setup=after, rates=rates).seconds
    passes = 8 * 3.0
    # The first unit's way is all that cannot hide: its last gradient down, its update, up again.
    assert beside == pytest.approx(passes + 0.1 + 0.14 + 0.1, rel=1e-6)
    assert waiting == pytest.approx(passes + 0.1 + 8 * 0.14 + 0.1, rel=1e-6)
