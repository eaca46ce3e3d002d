"""The host's share of the optimizer state: in bytes, to the nearest unit, and said in words."""

from __future__ import annotations

import json

import pytest
import torch

import forebay
from compat_cases import batches, engine_of, loss_of, same, train, weights
from config_cases import resolved
from forebay.compat.watching import enough_threads
from forebay.config.resolved import Source
from forebay.errors import BudgetError
from forebay.hardware.affinity import CoreShare
from forebay.model.spec import ModelSpec, ParamSpec, UnitSpec
from forebay.plan.placement import UpdatePlace
from forebay.plan.share import describe_places, host_share, places_for_share

OFFLOAD = {"device": "cpu"}


def _config(**offload):
    return {"zero_optimization": {"offload_optimizer": OFFLOAD | offload}}


def _spec(sizes, dtype="bfloat16"):
    return ModelSpec(
        units=tuple(
            UnitSpec(
                name=f"u{i}",
                params=(ParamSpec(index=i, names=(f"w{i}",), shape=(size,), dtype=dtype, group=0),),
            )
            for i, size in enumerate(sizes)
        )
    )


@pytest.mark.parametrize("sizes", [[100] * 30, [1000, *[100] * 28, 1000], [7], [0, 5, 0]])
def test_host_bytes_are_the_nearest_that_units_allow(sizes):
    spec, total = _spec(sizes), 10 * sum(sizes)
    before = -1
    for tenth in range(11):
        places = places_for_share(spec, share=tenth / 10)
        host = [10 * size for size, p in zip(sizes, places, strict=True) if p is UpdatePlace.HOST]
        cuts = [10 * sum(sizes[first:]) for first in range(len(sizes) + 1)]
        assert sum(host) in cuts
        assert all(abs(sum(host) - tenth / 10 * total) <= abs(c - tenth / 10 * total) for c in cuts)
        assert sum(host) >= before  # monotone
        before = sum(host)
        # the device has those that the next forward needs first
        assert places == tuple(sorted(places, key=lambda place: place is UpdatePlace.HOST))


@pytest.mark.parametrize(("ratio", "expected"), [(1.0, [1, 1]), (0.0, [0, 0]), (0.4, [0, 1])])
def test_the_configuration_s_ratio(ratio, expected):
    """`small` has 104 parameters in its first block and 42 in its second."""
    engine = engine_of(_config(ratio=ratio))
    try:
        places = [unit.placement.update for unit in engine.core.units]
        assert [place is UpdatePlace.HOST for place in places] == [bool(e) for e in expected]
        train(engine, 3)
        here = weights(engine)
    finally:
        engine.close()
    reference = engine_of()
    train(reference, 3)
    assert same(here, weights(reference))
    reference.close()


def test_said_where_the_planner_chose_and_where_the_user_did():
    engine = engine_of()
    rows = {row.path.rpartition(".")[2]: row for row in engine.config.describe()}
    engine.close()
    assert (rows["ratio"].value, rows["ratio"].source) == ("1.000", Source.DERIVED)
    assert rows["ratio"].note == "0 to 2 on the host"
    assert "update thread" in rows["cpuadam_cores_perc"].note
    engine = engine_of(_config(ratio=0.4))
    rows = {row.path.rpartition(".")[2]: row for row in engine.config.describe()}
    assert (rows["ratio"].value, rows["ratio"].source) == ("0.4", Source.GIVEN)
    assert rows["ratio"].note == "0 on the device; 2 on the host"
    assert host_share(engine.core.placement) == pytest.approx(42 / 146)
    assert describe_places(engine.core.placement) == rows["ratio"].note
    engine.close()


def test_a_ratio_without_offload_is_refused():
    with pytest.raises(forebay.ConfigError, match=r"ratio = 0.5 needs state off the device"):
        resolved(_config(device="none", ratio=0.5))


def test_state_that_the_device_has_no_room_for():
    with pytest.raises(BudgetError, match="device_budget is"):
        engine_of({**_config(ratio=0.0), "forebay": {"device_budget": 4096}})


@pytest.mark.parametrize("value", [-0.1, 1.5, "half", True])
def test_a_share_that_is_none(value):
    with pytest.raises(forebay.ConfigError, match="ratio"):
        resolved(_config(ratio=value))


def test_the_share_survives_saving():
    config = resolved(_config(ratio=0.25, cpuadam_cores_perc=0.5))
    again = resolved(json.loads(config.as_json()))
    assert again == config
    assert (again.zero.ratio, again.zero.update_cores) == (0.25, 0.5)
    assert resolved(_config()).zero.ratio is None


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_share_of_the_cores(share):
    engine = engine_of(_config(cpuadam_cores_perc=share))
    try:
        everything = engine_of()
        possible = everything.core.cores.threads
        everything.close()
        threads = engine.core.cores.threads
        assert 1 <= threads <= possible
        assert threads == possible or share < 1.0
        for x in batches(1):
            engine.backward(loss_of(engine, x))
            engine.step()
    finally:
        engine.close()


def test_fewer_threads_are_spread_over_the_share():
    share = CoreShare(threads=12, cpus=tuple(range(1, 13)), summary="")
    assert share.limited(4).cpus == (1, 4, 7, 10)
    assert share.limited(0).threads == 1
    assert share.limited(99) is share
    unpinned = CoreShare(threads=4, cpus=(), summary="")
    assert (unpinned.limited(2).threads, unpinned.limited(2).cpus) == (2, ())


def test_measured_threads():
    from forebay.hardware.profile import ThreadRate

    class Measured:
        threads = tuple(
            ThreadRate(threads=count, update=rate * 1e9, copy=1e9)
            for count, rate in [(1, 10), (4, 39), (8, 78), (12, 79), (16, 77)]
        )

    assert enough_threads(Measured()) == 8


def test_models_of_several_dtypes_are_counted_in_bytes():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16).bfloat16(), torch.nn.Linear(16, 16))
    source = torch.optim.AdamW(model.parameters())
    from forebay.model.inspect import inspect_model

    spec = inspect_model(model, groups=source.param_groups).spec
    # 10 bytes of state for each bf16 parameter, 8 for each fp32 one: 2720 and 2176
    assert places_for_share(spec, share=0.45) == (UpdatePlace.DEVICE, UpdatePlace.HOST)
