"""The simulator keeps the program's order, one task to a lane, and every byte."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.model.layout import UnitLayout, layout_unit
from forebay.model.spec import ParamSpec
from forebay.plan import (
    Accumulation,
    Lane,
    Placement,
    UnitPlacement,
    UpdatePlace,
    WeightPlace,
    build_program,
)
from forebay.plan.fluid import Task, run
from forebay.plan.home_bytes import streamed_bytes
from forebay.plan.placement import AccumulationOrder
from forebay.plan.program import OpKind, Turn
from forebay.plan.simulate import ComputeSeconds, simulate
from forebay.plan.solve import Rates
from forebay.plan.timeline import Row

_DTYPES = st.sampled_from(["bfloat16", "float16", "float32"])
_RATE = st.floats(1e8, 1e12)


def _frozen(index: int, size: int) -> UnitLayout:
    name = f"u{index}"
    param = ParamSpec(index=index, names=(name,), shape=(size,), dtype="bfloat16", group=-1)
    return layout_unit(name, index=index, params=[param])


@st.composite
def _cases(draw):
    count = draw(st.integers(1, 6))
    accumulation = draw(st.sampled_from(list(Accumulation)))
    places = [UpdatePlace.HOST, UpdatePlace.DEVICE]
    if accumulation is not Accumulation.HOST_SUM:
        places.append(UpdatePlace.STREAMED)
    units = []
    for index in range(count):
        size, dtype = draw(st.integers(0, 1 << 20)), draw(_DTYPES)
        params = [ParamSpec(index=index, names=(f"p{index}",), shape=(size,), dtype=dtype, group=0)]
        layout = layout_unit(f"u{index}", index=index, params=params)
        place = draw(st.sampled_from(places))
        away = place is not UpdatePlace.DEVICE and draw(st.booleans())
        weights = WeightPlace.HOST if away else WeightPlace.DEVICE
        units.append(UnitPlacement(layout=layout, update=place, weights=weights))
    few = draw(st.integers(0, 3))
    frozen = tuple(
        UnitPlacement(layout=layout, update=UpdatePlace.HOST, weights=WeightPlace.HOST)
        for layout in (_frozen(count + n, draw(st.integers(0, 1 << 20))) for n in range(few))
    )
    away = [u for u in (*units, *frozen) if u.weights is WeightPlace.HOST]
    sizes = [streamed_bytes(u.layout) for u in away]
    placement = Placement(
        units=tuple(units),
        frozen=frozen,
        pool_bytes=max(sizes, default=0) + draw(st.integers(0, sum(sizes))),
        accumulation=accumulation,
        backwards_per_update=1 if accumulation is Accumulation.SINGLE else draw(st.integers(1, 3)),
    )
    if placement.accumulation is not Accumulation.HOST_SUM and draw(st.booleans()):
        together = AccumulationOrder.LAYER
        micro = placement.backwards_per_update
        placement = replace(placement, order=together, backwards_per_update=1, micro_batches=micro)
    order = draw(st.permutations(range(count + few)))
    seconds = st.floats(0, 0.01)
    compute = ComputeSeconds(
        forward=tuple(draw(seconds) for _ in order),
        backward=tuple(draw(seconds) for _ in order),
        inputs=draw(st.just(()) | st.tuples(*[st.integers(0, 1 << 20)] * len(order))),
    )
    rates = Rates(host_memory=draw(_RATE), link_up=draw(_RATE), link_down=draw(_RATE))
    return placement, order, compute, rates


@settings(max_examples=60, deadline=None)
@given(_cases())
def test_order_lanes_and_bytes(case):
    placement, order, compute, rates = case
    program = build_program(placement, order=order)
    result = simulate(
        program, placement=placement, rates=rates, compute=compute, order=order, windows=2
    )
    at = {(one.op.index, one.window, one.backward): one for one in result.ops}
    last = program.backwards - 1
    for one in result.ops:
        for before in one.op.after:
            turn = one.backward if program.ops[before].turn is one.op.turn else last
            assert at[before, one.window, turn].end <= one.begin
    runs = {Turn.EVERY: program.backwards, Turn.EARLIER: program.backwards - 1, Turn.LAST: 1}
    assert len(result.ops) == 2 * sum(runs[op.turn] for op in program.ops)
    timeline = result.timeline
    for lane, row in ((Lane.UP, Row.UP), (Lane.DOWN, Row.DOWN)):
        inputs = program.backwards * sum(compute.inputs)
        assert timeline.nbytes(row) == 2 * (program.traffic(lane) + inputs)
    for row in (Row.COMPUTE, Row.UP, Row.DOWN, Row.HOST_UPDATE):
        spans = timeline.in_row(row)
        assert all(a.end <= b.begin + 1e-12 for a, b in itertools.pairwise(spans))
    work = program.backwards * placement.micro_batches * sum(compute.forward + compute.backward)
    assert result.step_seconds >= work * (1 - 1e-6)
    for lane, rate in ((Lane.UP, rates.link_up), (Lane.DOWN, rates.link_down)):
        assert timeline.end >= program.traffic(lane) / rate * (1 - 1e-6)


@settings(max_examples=40, deadline=None)
@given(_cases())
def test_weights_are_there_before_they_are_read(case):
    placement, order, compute, rates = case
    program = build_program(placement, order=order)
    result = simulate(
        program, placement=placement, rates=rates, compute=compute, order=order, windows=2
    )
    arrived = {
        f"u{one.op.unit}": one.end
        for one in result.ops
        if one.window == 0 and one.op.kind in (OpKind.UPDATE, OpKind.PUBLISH)
    }
    forwards = [i for i in result.timeline.in_row(Row.COMPUTE) if i.name.startswith("forward")]
    for unit, when in arrived.items():
        mine = [i for i in forwards if i.name == f"forward {unit}"]
        if len(mine) == 2 * program.backwards:
            assert mine[program.backwards].begin >= when


def test_two_lanes_share_host_memory():
    tasks = [
        Task(lane="a", work=100.0, rate=100.0, memory=1.0),
        Task(lane="b", work=50.0, rate=100.0, memory=1.0),
        Task(lane="c", work=1.0, rate=1.0),
    ]
    # Together 200 wanted, 100 given: b ends at 1, a has 50 left and then has it alone.
    spans = run(tasks, memory=100.0)
    assert [span.end for span in spans] == pytest.approx([1.5, 1.0, 1.0])


def test_a_circle_is_refused():
    with pytest.raises(ValueError, match="circle"):
        run([Task(lane="a", work=1.0, after=(1,)), Task(lane="a", work=1.0, after=(0,))], memory=1)


def test_work_of_almost_nothing_ends():
    """Numbers so small that their last digits are lost must not keep a clock running."""
    tasks = [
        Task(lane="a", work=1e-300, rate=3e8, memory=1.0),
        Task(lane="b", work=7e-310, rate=0.3),
    ]
    assert len(run(tasks, memory=7e7)) == 2
