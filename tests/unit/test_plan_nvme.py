"""What a plan says of drives: the state that they hold, what a step writes, how long they last."""

from __future__ import annotations

import re
from dataclasses import replace

from forebay.hardware.catalog import CATALOG
from forebay.plan.choose import choose
from forebay.plan.explain import as_text, config_of
from forebay.plan.setup import Home, Setup
from forebay.plan.step import step_forecast
from forebay.plan.tiers import tier_bytes
from plan_cases import LLAMA_8B, question


def test_a_plan_with_state_on_drives_says_what_that_writes():
    choice = choose(question(LLAMA_8B | {"num_hidden_layers": 64}, "4090"))
    assert choice.best is not None
    assert choice.best.setup.optimizer is Home.NVME
    text = " ".join(as_text(choice).split())
    said = re.search(
        r"each update writes ([\d.]+) TB to each node's drives: at this pace they reach their "
        r"rated life in ([\d,]+) days",
        text,
    )
    assert said is not None, text
    # state that host memory has no room for
    state = choice.best.tiers.total("nvme")
    assert state < 12 * choice.question.shape.parameters
    assert abs(float(said.group(1)) * 1e12 / state - 1) < 0.02
    # rated for one whole write of the drive a day for five years
    drives = CATALOG["4090"].drives
    assert drives is not None
    paces = drives.capacity_bytes / state * choice.best.seconds / 86400
    days = float(said.group(2).replace(",", ""))
    assert abs(days - paces * 5 * 365) < 0.5 + 0.01 * days  # it says whole days
    assert "never a network disk" in text


def test_no_step_is_faster_than_the_drives_that_its_state_comes_from():
    asked = question(LLAMA_8B, "4090", sequence=256)
    setup = Setup(stage=3, optimizer=Home.NVME, weights=Home.HOST, workload=asked.workload)
    state = tier_bytes(asked.shape, setup).total("nvme")
    drives = asked.profile.drives
    assert drives is not None
    for accumulation in (1, 3):
        work = replace(asked.workload, accumulation=accumulation)
        found = step_forecast(asked.shape, replace(setup, workload=work), profile=asked.profile)
        assert found.seconds >= state / min(drives.read, drives.write)
        assert "drives" in found.bound


def test_state_that_memory_has_room_for_stays_there():
    config = LLAMA_8B | {"num_hidden_layers": 40}
    choice = choose(question(config, "4090", free=None, micro_batch=1, accumulation=8))
    assert choice.best is not None
    setup, tiers = choice.best.setup, choice.best.tiers
    assert setup.optimizer is Home.NVME
    assert choice.capacity.host * 0.99 < tiers.total("host") <= choice.capacity.host
    on_drives = tier_bytes(choice.question.shape, replace(setup, host_budget=None))
    assert 0 < tiers.total("nvme") < 0.3 * on_drives.total("nvme")
    written = config_of(choice, choice.best)
    assert 0.5 < written["zero_optimization"]["offload_optimizer"]["ratio"] < 1
    assert written["forebay"]["host_budget"] == f"{(setup.host_budget >> 20) + 16}MiB"
    assert "with part of the training state on drives" in as_text(choice)
    # with nothing on the device the written share keeps what memory holds out of the drives
    alone = replace(choice.best, step=None)
    assert config_of(choice, alone)["zero_optimization"]["offload_optimizer"]["ratio"] == 1.0


def test_drives_stay_empty_where_devices_hold_what_memory_cannot():
    choice = choose(question(LLAMA_8B, "4090", free=None, micro_batch=1, accumulation=8))
    assert choice.best is not None
    assert choice.best.setup.optimizer is Home.NVME
    assert choice.best.tiers.total("nvme") == 0
    assert "drives" not in choice.best.reason
    assert "with part of the training state in host memory" in as_text(choice)
    assert "rated life" not in as_text(choice)


def test_a_budget_that_has_room_for_all_leaves_the_drives_alone():
    choice = choose(question(LLAMA_8B, "h100", devices=1))
    ways = [one for one in choice.all if one.setup.optimizer is Home.NVME]
    assert ways
    assert all(one.tiers.total("nvme") == 0 for one in ways)
    assert all("host memory holds all of the state" in one.reason for one in ways)
