"""`forebay.offload(update=...)`: the names and settings of the configuration, no others."""

from __future__ import annotations

import pytest
import torch

import forebay
from config_cases import resolved
from forebay.compat.policies import policy_of
from forebay.engine import EngineOptions, offload_with
from forebay.engine.offload_policy import _MODES, asked_policy
from forebay.errors import ConfigError, UnsupportedError
from forebay.plan import UpdatePlace
from forebay.plan.policies import EXACT, Delayed, Speculative
from forebay.plan.zenflow import ZenFlow
from unit.engine_cases import adamw, mlp, run


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        ("exact", EXACT),
        ("zenflow", ZenFlow(update_every=None, select_every=100)),
        ("speculative", Speculative()),
        ("delayed", Delayed(warm_up_steps=40)),
        ({"delayed": {"warm_up_steps": 1}}, Delayed(warm_up_steps=1)),
        (
            {"zenflow": {"topk_ratio": 0.2, "update_interval": 2, "overlap_step": True}},
            ZenFlow(topk_ratio=0.2, update_every=2, select_every=100, overlaps=True),
        ),
    ],
)
def test_each_mode_trains(update, expected):
    model = mlp(torch.float32)
    clip = 1.0 if expected == Speculative() else None
    model, optimizer = forebay.offload(
        model, adamw(model), device="cpu", update=update, clip_norm=clip
    )
    assert optimizer.engine.placement.policy == expected
    run(model, optimizer, steps=3)
    optimizer.close()


@pytest.mark.parametrize(
    ("update", "says"),
    [
        ("eager", "update is 'eager'; it must be one of exact, speculative, delayed, zenflow"),
        ({"exact": {}, "delayed": {}}, "it must be one of"),
        ({"delayed": {"topk_ratio": 0.1}}, "update 'delayed' has no setting 'topk_ratio'"),
        ({"delayed": {"device_budget": 1}}, "has no setting 'device_budget'"),
        ({"delayed": {"warm_up_steps": -1}}, "warm_up_steps"),
        ({"zenflow": {"topk_ratio": 2.0}}, "topk_ratio is 2.0; it must be a number above 0 and"),
        ({"zenflow": {"topk": 0.1}}, "has no setting 'topk'"),
        ({"zenflow": {"overlap_step": 1}}, "overlap_step is 1; it must be true or false"),
        (
            {"zenflow": {"select_interval": 2, "update_interval": 3}},
            "update_interval = 3 is above the 2 up",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(update, says):
    model = mlp(torch.float32)
    with pytest.raises(ConfigError, match=says):
        forebay.offload(model, adamw(model), device="cpu", update=update)


def test_names_and_defaults_are_those_of_the_configuration():
    section = {"topk_ratio": 0.3, "full_warm_up_rounds": 2, "offload": True, "auto_ratio": 0.5}
    for update in _MODES:
        for settings in ({}, section) if update == "zenflow" else ({},):
            zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
            zero |= {"zenflow": settings} if settings else {}
            config = resolved({"zero_optimization": zero, "forebay": {"update": update}})
            assert asked_policy({update: settings}) == policy_of(config)


@pytest.mark.parametrize("policy", [Delayed(), ZenFlow()])
def test_units_that_are_to_visit_the_device_are_refused(policy):
    """The planner's own choice of them gives way."""
    model = mlp(torch.float32)
    options = EngineOptions(device="cpu", policy=policy, update=UpdatePlace.STREAMED)
    with pytest.raises(UnsupportedError, match=r"(?s)visit the device.*streamed_units"):
        offload_with(model, adamw(model), options=options)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"update": "delayed", "synchronous": True}, "outlast their step"),
        ({"update": "delayed", "parameters": "host"}, "do not keep weights on the host"),
        ({"update": "zenflow", "nvme_path": "."}, "zenflow does not keep state in files"),
        ({"update": "speculative", "nvme_path": "."}, "do not keep state in files"),
    ],
)
def test_what_a_mode_excludes_is_refused(arguments, says):
    model = mlp(torch.float32)
    with pytest.raises(UnsupportedError, match=says):
        forebay.offload(model, adamw(model), device="cpu", **arguments)
