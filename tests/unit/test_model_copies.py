"""`copy.deepcopy(model)` between a step and the arrival of its weights: what `state_dict` has."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from forebay.links import FaultScript
from forebay.plan import SixteenBitMaster, UpdatePlace, WeightPlace
from forebay.plan.policies import Delayed
from forebay.plan.zenflow import ZenFlow
from unit.engine_cases import CPU, FILES, offloaded, same, weights
from unit.streaming_cases import AWAY, deep, inputs, step

# Every copy is late, and updates with them: whoever does not wait sees it.
LATE = FaultScript(seed=0, max_delay_us=20_000)
OPTIONS = {
    "resident": CPU,
    "resident_delayed": replace(CPU, policy=Delayed()),
    "resident_zenflow": replace(CPU, policy=ZenFlow(topk_ratio=0.2, update_every=2)),
    "on_host": AWAY,
    "many_units": replace(AWAY, unit_elements=1),
    "in_a_pool": replace(AWAY, pool_bytes=1 << 16),
    "whole_master": replace(AWAY, bf16_master=SixteenBitMaster.WHOLE),
    "visiting_state": replace(AWAY, update=UpdatePlace.STREAMED),
    "in_files": replace(AWAY, update=None, weights=WeightPlace.NVME, nvme=FILES),
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_copy_after_a_step_has_its_weights(kind):
    model = deep()
    with offloaded(model, replace(OPTIONS[kind], fault=LATE)) as optimizer:
        for x in inputs(2):
            step(model, optimizer, x)
            copied = copy.deepcopy(model)
            assert same(weights(copied), weights(model))
        again = pickle.loads(pickle.dumps(copied))
        assert same(weights(again), weights(copied))


@pytest.mark.parametrize("kind", ["resident", "on_host"])
def test_a_copy_has_what_was_assigned_since_the_step(kind):
    model = deep()
    with offloaded(model, replace(OPTIONS[kind], fault=LATE)) as optimizer:
        step(model, optimizer, inputs(1)[0])
        one = next(model.parameters())
        one.data = torch.full_like(one, 0.25)
        copied = copy.deepcopy(model[0])  # its own weights are copied before any hook is
        assert (copied.weight == 0.25).all()
        assert same(weights(copied), weights(model[0]))
        assert copied.weight.data_ptr() != model[0].weight.data_ptr()


def test_an_average_over_copies_is_the_average_of_the_weights():
    model, seen = deep(torch.float32), []
    averaged = AveragedModel(model)
    with offloaded(model, replace(AWAY, fault=LATE)) as optimizer:
        for x in inputs(3):
            step(model, optimizer, x.float())
            averaged.update_parameters(copy.deepcopy(model))
            seen.append(weights(model))
    for name, value in averaged.module.state_dict().items():
        assert torch.allclose(value, sum(one[name] for one in seen) / len(seen))
