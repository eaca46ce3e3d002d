"""The placement that is chosen, beside every other one, on the simulator's clock."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.model.layout import layout_unit
from forebay.model.spec import ModelSpec, ParamSpec, UnitSpec
from forebay.plan.home_bytes import streamed_bytes
from forebay.plan.placement import (
    Accumulation,
    Placement,
    UnitPlacement,
    UpdatePlace,
    WeightPlace,
)
from forebay.plan.program import build_program
from forebay.plan.search import search_places
from forebay.plan.simulate import ComputeSeconds, simulate
from forebay.plan.solve import DeviceRoom, Rates, choose_places, visit_bytes

# Less than that is no better: the simulator itself is not so right.
_TIE = 1.02
_PLACES = (UpdatePlace.HOST, UpdatePlace.STREAMED)


class Clock:
    """Seconds of a step of small models of bf16 units."""

    def __init__(self, sizes, *, rates, tokens, backwards, weights):
        self.rates, self.backwards, self.weights = rates, backwards, weights
        self.spec = ModelSpec(units=tuple(_unit(i, size) for i, size in enumerate(sizes)))
        forward = tuple(2e-14 * tokens * size for size in sizes)
        self.compute = ComputeSeconds(forward=forward, backward=tuple(3 * one for one in forward))

    def seconds(self, places):
        units = tuple(
            UnitPlacement(
                layout=layout_unit(unit.name, index=index, params=unit.params),
                update=place,
                weights=self.weights,
            )
            for index, (unit, place) in enumerate(zip(self.spec.units, places, strict=True))
        )
        placement = Placement(
            units=units,
            accumulation=Accumulation.SINGLE if self.backwards == 1 else Accumulation.HOST_SUM,
            backwards_per_update=self.backwards,
        )
        if self.weights is WeightPlace.HOST:
            held = [streamed_bytes(unit.layout) for unit in units]
            placement = replace(placement, pool_bytes=min(sum(held), 2 * max(held)))
        order = range(len(units))
        return simulate(
            build_program(placement, order=order),
            placement=placement,
            rates=self.rates,
            compute=self.compute,
            order=order,
        ).step_seconds

    def chosen(self, room=None):
        sizes = [
            visit_bytes(unit, backwards=self.backwards, weights=self.weights)
            for unit in self.spec.units
        ]

        def fits(places):
            visits = sum(s for s, p in zip(sizes, places, strict=True) if p is _PLACES[1])
            return room is None or visits <= room

        start = choose_places(
            self.spec,
            rates=self.rates,
            room=DeviceRoom(visit_bytes=room),
            backwards=self.backwards,
            weights=self.weights,
        )
        return search_places(start, score=self.seconds, fits=fits), fits


def _unit(index, size):
    param = ParamSpec(index=index, names=(f"w{index}",), shape=(size,), dtype="bfloat16", group=0)
    return UnitSpec(name=f"u{index}", params=(param,))


@st.composite
def _clocks(draw):
    block = 50_000_000
    sizes = [block] * draw(st.integers(1, 5))
    sizes[0] *= draw(st.integers(1, 4))
    link = draw(st.sampled_from([12e9, 25e9, 55e9, 350e9]))
    memory = draw(st.sampled_from([60e9, 100e9, 200e9, 400e9]))
    rates = Rates(
        host_memory=memory,
        link_up=link,
        link_down=link,
        update=0.9 * memory,
        both=1.8 * link,
        both_beside_update=1.4 * link,
    )
    return Clock(
        sizes,
        rates=rates,
        tokens=draw(st.sampled_from([0, 500, 4000, 16000])),
        backwards=draw(st.sampled_from([1, 3])),
        weights=draw(st.sampled_from([WeightPlace.DEVICE, WeightPlace.HOST])),
    )


@settings(max_examples=25, deadline=None)
@given(_clocks(), st.sampled_from([None, 0.0, 0.4]))
def test_no_placement_is_better_than_the_chosen_one(clock, share):
    total = sum(
        visit_bytes(one, backwards=clock.backwards, weights=clock.weights)
        for one in clock.spec.units
    )
    places, fits = clock.chosen(room=None if share is None else int(share * total))
    assert fits(places)
    mine = clock.seconds(places)
    for other in itertools.product(_PLACES, repeat=len(places)):
        if fits(other):
            assert mine <= _TIE * clock.seconds(other), (places, other)


@pytest.mark.parametrize("weights", [WeightPlace.DEVICE, WeightPlace.HOST])
def test_of_many_units_no_number_of_streamed_ones_is_better(weights):
    rates = Rates(host_memory=60e9, link_up=25e9, link_down=25e9, update=55e9, both=46e9)
    sizes = [525_000_000] + [208_000_000] * 20
    clock = Clock(sizes, rates=rates, tokens=8192, backwards=1, weights=weights)
    places, _ = clock.chosen()
    mine = clock.seconds(places)
    for count in range(0, len(sizes) + 1, 2):
        other = (_PLACES[1],) * count + (_PLACES[0],) * (len(sizes) - count)
        assert mine <= _TIE * clock.seconds(other)


def test_a_search_ends_with_its_trials():
    asked = []

    def score(places):
        asked.append(places)
        return float(places.count(UpdatePlace.HOST))

    start = (UpdatePlace.HOST,) * 30
    found = search_places(start, score=score, trials=5)
    assert len(asked) == len(set(asked)) == 5
    assert found.count(UpdatePlace.STREAMED) > 0
    assert search_places(start, score=score, trials=0) == start
