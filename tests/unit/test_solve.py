"""The choice of update places."""

from __future__ import annotations

import pytest

from forebay.model.spec import ModelSpec, ParamSpec, UnitSpec
from forebay.plan.placement import UpdatePlace
from forebay.plan.solve import DeviceRoom, Rates, choose_places, window_seconds


def blocks(count, elements=1_000_000, dtype="bfloat16"):
    return ModelSpec(
        units=tuple(
            UnitSpec(
                name=f"block{i}",
                params=(
                    ParamSpec(index=i, names=(f"w{i}",), shape=(elements,), dtype=dtype, group=0),
                ),
            )
            for i in range(count)
        )
    )


def test_streamed_units_come_first_and_balance_both_sides():
    spec = blocks(100)
    places = choose_places(spec, rates=Rates(host_memory=100e9, link_up=50e9, link_down=50e9))
    streamed = places.count(UpdatePlace.STREAMED)
    assert places == (UpdatePlace.STREAMED,) * streamed + (UpdatePlace.HOST,) * (100 - streamed)
    # 10 y / 50 = (26 (100 - y) + 10 y) / 100  ->  y = 72.2
    assert streamed == pytest.approx(72, abs=1)


def test_resident_units_fill_their_bytes():
    spec = blocks(10)
    places = choose_places(spec, room=DeviceRoom(resident_bytes=35_000_000))
    assert places[:4] == (UpdatePlace.DEVICE,) * 3 + (UpdatePlace.STREAMED,)
    assert set(choose_places(spec, room=DeviceRoom(resident_bytes=1 << 40))) == {UpdatePlace.DEVICE}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("link", [3e9, 12e9, 25e9, 350e9])
def test_no_number_of_streamed_units_is_better(dtype, link):
    spec, rates = blocks(30, dtype=dtype), Rates(link_up=link, link_down=link)
    best = window_seconds(spec, choose_places(spec, rates=rates), rates=rates)
    for streamed in range(31):
        tried = (UpdatePlace.STREAMED,) * streamed + (UpdatePlace.HOST,) * (30 - streamed)
        assert best <= window_seconds(spec, tried, rates=rates)


def test_no_units_and_empty_parameters():
    assert choose_places(ModelSpec(units=())) == ()
    assert len(choose_places(blocks(3, elements=0))) == 3
