"""Where units update, as a configuration says it, down to the engine."""

from __future__ import annotations

import json

import pytest
import torch

import forebay
from config_cases import refusal, resolved
from forebay.errors import ConfigError
from forebay.plan.placement import UpdatePlace

_CPU = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def _units(*numbers):
    return {"forebay": {"streamed_units": list(numbers)}}


def test_the_named_units_visit_the_device():
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **_CPU,
        **_units(2, 0),
    }
    engine, *_ = forebay.initialize(model=model, config=config)
    with engine:
        units = engine.core.placement.units
        visits = [u.layout.index for u in units if u.update is UpdatePlace.STREAMED]
        assert visits == [0, 2]
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()


def test_a_unit_that_is_not_there():
    model = torch.nn.Linear(8, 8)
    config = {"train_micro_batch_size_per_gpu": 2, **_CPU, **_units(0, 7)}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
    with pytest.raises(ConfigError, match="names unit 7; this model has 1, from 0"):
        forebay.initialize(model=model, config=config)


def test_it_is_saved_and_read_again():
    config = resolved(_CPU, _units(1, 0, 3))
    assert config.zero.streamed_units == (0, 1, 3)
    assert resolved(json.loads(config.as_json())) == config
    assert resolved(_CPU, _units()).zero.streamed_units == ()
    assert resolved(_CPU).zero.streamed_units is None


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (({}, _units(0)), "needs optimizer state in host memory, and .*device is none"),
        (
            (_CPU, _units(0), {"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}}),
            "both say where units update",
        ),
        (
            ({"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}},),
            r"ratio = 0.5 needs state off the device, and .*device is none",
        ),
        ((_CPU, _units(0, 0)), "must be a list of different integers"),
        ((_CPU, _units(-1)), "must be a list of different integers"),
    ],
)
def test_what_makes_no_sense_is_refused(parts, message):
    error = refusal(*parts)
    with pytest.raises(ConfigError, match=message):
        raise error


@pytest.mark.parametrize(("ranks", "sharers", "fitting"), [(4, 1, (2, 4)), (7, 3, (7,))])
def test_ranks_that_do_not_come_out_in_copies_are_told_numbers_that_do(ranks, sharers, fitting):
    def _zero(stage: int, **keys: int) -> dict[str, dict[str, int]]:
        return {"zero_optimization": {"stage": stage, **keys}}

    for stage in (0, 3):
        hint = refusal(_zero(stage, mics_shard_size=sharers), world_size=ranks).hint
        assert hint.startswith(f"write {', '.join(map(str, fitting))}, or delete it")
        for number in fitting:
            assert resolved(_zero(stage, mics_shard_size=number), world_size=ranks)
        assert resolved(_zero(stage), world_size=ranks)
