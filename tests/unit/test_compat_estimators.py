"""The memory estimators: the engine's own bytes. Over ranks: `distributed/test_estimators.py`."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import forebay
from forebay.compat.estimators import _live
from forebay.errors import ConfigError
from forebay.plan.setup import Cluster
from forebay.plan.zero_memory import Backwards, Offload, blocks, zero_memory
from forebay.runtime.zero.stage3 import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from forebay.runtime.zero.stage_1_and_2 import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from forebay.units_of_measure import parse_bytes

GIB = 2**30


def _rows(text: str) -> list[tuple[float, float, str]]:
    """Sizes in GiB, and the options."""
    size = r" *([\d.]+ [GMK]?i?B)"
    found = re.findall(rf"^{size} \|{size} \| (.*)$", text, re.MULTILINE)
    return [(parse_bytes(a) / GIB, parse_bytes(b) / GIB, options) for a, b, options in found]


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("device", ["cpu", "none"])
def test_one_process_is_what_the_engine_places(device, accumulation):
    """The estimate is the allocator's own forecast: the ledger shows the same bytes."""
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(6))).bfloat16()
    size = _live(model)
    backwards = Backwards.ONE if accumulation == 1 else Backwards.SEVERAL
    offload = Offload.OPTIMIZER if device == "cpu" else Offload.NONE
    memory = zero_memory(size.spec, stage=2, offload=offload, backwards=backwards)
    engine, *_ = forebay.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": device}},
        },
    )
    with engine:
        placed = {"host": 0, "device": 0}
        for _ in range(accumulation):
            x = torch.ones(1, 300, dtype=torch.bfloat16, device=engine.device)
            engine.backward(engine(x).sum())
            engine.step()
        for row in engine.ledger.table():
            placed[row.tier.value] += row.nbytes
    assert placed["host"] == memory.host_bytes
    # the device of this test is the host, where each of three allocations a unit fills a page
    assert placed["device"] <= memory.device_bytes + 6 * 3 * 4096


def test_bytes_per_parameter_of_one_process():
    spec = blocks(640_000_000)
    one, two = Backwards.ONE, Backwards.SEVERAL
    ones = zero_memory(spec, stage=2, offload=Offload.OPTIMIZER, backwards=one)
    assert ones.host_bytes == pytest.approx(14 * spec.elements, rel=1e-3)
    several = zero_memory(spec, stage=2, offload=Offload.OPTIMIZER, backwards=two)
    assert several.host_bytes == pytest.approx(16 * spec.elements + (64 << 20), rel=1e-3)
    resident = zero_memory(spec, stage=2, offload=Offload.NONE, backwards=one)
    assert (resident.host_bytes, resident.device_bytes) == (
        0,
        pytest.approx(14 * spec.elements, rel=1e-3),
    )


def test_over_ranks_the_papers_figures_and_what_they_leave_out():
    """13B on 8 devices: stage 2 about 49 GB each, with offload 26 GB of weights and less than 3."""
    spec, eight = blocks(13_000_000_000), Cluster(devices_per_node=8)
    unit = spec.units[0].elements
    one = Backwards.ONE
    whole = zero_memory(spec, stage=2, offload=Offload.NONE, backwards=one, cluster=eight)
    # 2M + 14M/N; three units' gradients exchanged, one whole before that
    assert whole.device_bytes == pytest.approx(48.75e9 + 8 * unit, rel=2e-3)
    offloaded = zero_memory(spec, stage=2, offload=Offload.OPTIMIZER, backwards=one, cluster=eight)
    assert 26e9 + 6 * unit < offloaded.device_bytes < 29.25e9
    assert offloaded.host_bytes == pytest.approx(16 * spec.elements, rel=1e-3)
    # the slices of a third, 16M/N, and 2 GB of gathered weights
    two = Cluster(devices_per_node=8, nodes=2)
    third = zero_memory(spec, stage=3, offload=Offload.NONE, backwards=one, cluster=two)
    assert third.pool_bytes == 2_000_000_000
    assert third.device_bytes == pytest.approx(13e9 + 2e9 + 10 * unit, rel=0.02)
    assert estimate_zero3_model_states_mem_needs(10**9, 10**7, 4, 2)[2] == 4 * 10**7
    host, device = estimate_zero2_model_states_mem_needs(10**9, num_gpus_per_node=4)
    assert host == pytest.approx(16 * 10**9, rel=1e-3)
    assert device > 2.5 * 10**9


def test_table_of_stage_2(capsys):
    estimate_zero2_model_states_mem_needs_all_cold(7e9)
    captured = capsys.readouterr()
    assert captured.err == ""
    rows = _rows(captured.out)
    assert [options.split() for _, _, options in rows] == [
        ["offload_optimizer=cpu,", "one", "backward", "per", "update"],
        ["offload_optimizer=cpu,", "several", "backwards"],
        ["offload_optimizer=none,", "one", "backward", "per", "update"],
        ["offload_optimizer=none,", "several", "backwards"],
    ]
    assert rows[0][0] == pytest.approx(7e9 * 14 / GIB, abs=0.06)
    # weights, and gradients that wait for the link
    waiting = rows[0][1] - 7e9 * 2 / GIB
    assert 0.1 < waiting < 1.1
    assert "1 node with 1 GPU:" in captured.out
    assert "7,000,000,000 parameters" in captured.out
    assert "between ranks" not in captured.out


def test_table_of_several_nodes_says_what_its_figures_are(capsys):
    estimate_zero2_model_states_mem_needs_all_cold(
        7_000_000_000, num_gpus_per_node=8, num_nodes=2, additional_buffer_factor=1.5
    )
    text = capsys.readouterr().out
    assert "Room for exchanges between ranks is in the figures" in text
    assert "2 nodes with 8 GPUs each:" in text
    assert _rows(text)[0][0] == pytest.approx(1.5 * 7e9 * 16 / 2 / GIB, rel=1e-3)


def test_live_models_count_tied_and_frozen_weights_once(capsys):
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(1 << 16, 512), nn.Linear(512, 512), nn.Linear(512, 1))
        model.append(nn.Linear(512, 1 << 16, bias=False))
    model[3].weight = model[0].weight
    model[1].requires_grad_(False)
    estimate_zero2_model_states_mem_needs_all_live(model)
    text = capsys.readouterr().out
    assert f"{(1 << 16) * 512 + 513:,} parameters" in text
    estimate_zero3_model_states_mem_needs_all_live(model)
    text = capsys.readouterr().out
    assert len(_rows(text)) == 6
    assert "stage 3 without offload_param places what stage 2 places" in text
    estimate_zero3_model_states_mem_needs_all_cold(10**9, 10**8)
    assert "a layer has 100,000,000 at most" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: estimate_zero2_model_states_mem_needs_all_live(7), "needs an nn.Module, not int"),
        (
            lambda: estimate_zero2_model_states_mem_needs_all_live(nn.ReLU()),
            "no parameter of the model requires a gradient",
        ),
        (lambda: estimate_zero2_model_states_mem_needs_all_cold(0), "total_params is 0"),
        (lambda: estimate_zero2_model_states_mem_needs_all_cold(1.5), "total_params is 1.5"),
        (lambda: estimate_zero2_model_states_mem_needs_all_cold(9, 0), "num_gpus_per_node is 0"),
        (lambda: estimate_zero3_model_states_mem_needs_all_cold(9, 10), "total_params only 9"),
        (
            lambda: estimate_zero2_model_states_mem_needs_all_cold(
                9, additional_buffer_factor=-1.0
            ),
            "additional_buffer_factor is -1.0",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ConfigError) as caught:
        call()
    assert message in str(caught.value)
