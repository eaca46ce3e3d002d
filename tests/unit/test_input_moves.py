"""Blocks' inputs on the host, on a clock: a fast link hides them, a slow one is waited for."""

from __future__ import annotations

import pytest

from forebay.model.layout import layout_unit
from forebay.plan import Accumulation, Placement, UnitPlacement, UpdatePlace, build_program
from forebay.plan.placement import AccumulationOrder
from forebay.plan.simulate import ComputeSeconds, simulate
from forebay.plan.solve import Rates
from forebay.plan.timeline import Row

_BLOCKS, _BYTES = 8, 1000
_INPUTS = (0, *[_BYTES] * (_BLOCKS - 1), 0)


def _run(link: float, inputs: tuple[int, ...] = _INPUTS, **more):
    units = tuple(
        UnitPlacement(
            layout=layout_unit(f"u{index}", index=index, params=()), update=UpdatePlace.DEVICE
        )
        for index in range(_BLOCKS + 1)
    )
    placement = Placement(units=units, accumulation=Accumulation.SINGLE, **more)
    order = range(len(units))
    return simulate(
        build_program(placement, order=order),
        placement=placement,
        rates=Rates(host_memory=1e12, link_up=link, link_down=link),
        compute=ComputeSeconds(
            forward=(0.0, *[1.0] * _BLOCKS), backward=(0.0, *[3.0] * _BLOCKS), inputs=inputs
        ),
        order=order,
    )


def test_a_fast_link_hides_them():
    assert _run(link=1000.0).step_seconds == pytest.approx(4 * _BLOCKS, rel=0.01)


def test_forward_waits_for_a_slow_link_and_so_does_backward():
    # seven each way, four seconds each; those behind the blocks' own seconds are waited for
    seconds = _run(link=250.0).step_seconds
    assert seconds > 4 * _BLOCKS + 10
    assert _run(link=250.0, inputs=()).step_seconds == pytest.approx(4 * _BLOCKS)
    assert seconds < 4 * _BLOCKS + 2 * 4 * (_BLOCKS - 1)


def test_no_more_than_two_are_on_their_way_and_two_come_up_ahead():
    timeline = _run(link=500.0).timeline
    computed = {i.name: i for i in reversed(timeline.in_row(Row.COMPUTE))}
    down = {i.name: i for i in reversed(timeline.in_row(Row.DOWN))}
    up = {i.name: i for i in reversed(timeline.in_row(Row.UP))}
    for block in range(1, _BLOCKS - 2):
        gone = down[f"input of u{block}"]
        assert gone.begin >= computed[f"forward u{block}"].end
        assert gone.end <= computed[f"forward u{block + 3}"].begin
    for block in range(1, _BLOCKS):
        back = up[f"input of u{block}"]
        assert back.end <= computed[f"backward u{block}"].begin
        later = min(block + 2, _BLOCKS)
        assert back.begin >= computed[f"backward u{later}"].begin - 1e-9 - 2 * 3.0
    assert sum(interval.nbytes for interval in timeline.in_row(Row.UP)) == 3 * 7 * _BYTES


def test_in_layer_order_a_block_leaves_all_but_its_last_before_the_next_but_one():
    found = _run(
        link=500.0,
        inputs=(0, *[2 * _BYTES] * (_BLOCKS - 1), 0),
        order=AccumulationOrder.LAYER,
        micro_batches=2,
    )
    down = {i.name: i for i in reversed(found.timeline.in_row(Row.DOWN))}
    computed = {i.name: i for i in reversed(found.timeline.in_row(Row.COMPUTE))}
    for block in range(1, _BLOCKS - 1):
        assert down[f"input of u{block}"].end <= computed[f"forward u{block + 2}"].begin
