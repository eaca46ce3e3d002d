"""The planner's answers: order of choice, memory, bounds, advice, words."""

from __future__ import annotations

import itertools
import json
import resource
import subprocess
import sys
from dataclasses import fields, replace

import pytest

from forebay.hardware.catalog import (
    CATALOG,
    FACTOR_SOURCES,
    LINK_SOURCES,
    LINKS,
    Factors,
    profile_of,
)
from forebay.hardware.profile import Profile
from forebay.hardware.sheets import SHEETS
from forebay.hardware.sources import DGXH
from forebay.plan.activations import activations
from forebay.plan.advice import margins, offload_worth
from forebay.plan.choose import Verdict, choose
from forebay.plan.compare import comparison
from forebay.plan.explain import as_dict, as_text, config_of, sentence
from forebay.plan.feasible import fits
from forebay.plan.memory import forecast
from forebay.plan.nearest import nearest_changes
from forebay.plan.setup import Cluster, Home, Setup
from forebay.plan.step import _step_forecast, rank_rates, step_forecast
from forebay.plan.tiers import capacity, placement_of, tier_bytes
from forebay.plan.workload import Inputs, Precision, Recompute, Workload
from plan_cases import LLAMA_3B, LLAMA_8B, LLAMA_405B, question


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_catalogued_machines_are_profiles_with_sources(name):
    profile, sheet = CATALOG[name], SHEETS[name]
    assert Profile.from_dict(json.loads(profile.as_json()), source=name) == profile
    assert profile_of(sheet) == profile
    named = [name for names in sheet.sources for name in names.split(", ")]
    assert len(named) == len(set(named))
    known = {field.name for field in fields(sheet)} - {"title", "sources"}
    assert set(named) | {"matrix_reached"} == known
    assert ("matrix_reached" in named) == bool(sheet.matrix_reached)
    for source in sheet.sources.values():
        assert source.document
        # what no page says is marked, and says what it rests on
        assert source.is_found or source.note or "DDR" in source.document or source is DGXH
    # Nothing is faster than its sheet.
    assert profile.device_memory < sheet.device_memory
    assert max(rate.update for rate in profile.threads) < sheet.host_memory
    for rate in profile.matrix:
        assert rate.flops < sheet.matrix[rate.dtype]


def test_the_plan_explains_its_words_and_no_others():
    text = as_text(choose(question(LLAMA_8B, "4090", sequence=1024)))
    first, *_ = text.splitlines()
    assert first.startswith("Yes, this fits: all 8.03 billion parameters train on this device")
    words = text.partition("Words:")[2]
    assert "optimizer state: what the optimizer remembers" in words
    assert "gradient sums" not in words
    assert "visits the device for its update, the others are updated on the host" in text
    without = as_text(choose(question(LLAMA_3B, "h200", devices=1)))
    assert "units" not in without.partition("Words:")[0]


def test_each_factor_and_link_of_the_catalogue_has_a_source():
    assert {field.name for field in fields(Factors)} == set(FACTOR_SOURCES) - {"widths"}
    assert set(LINKS) == set(LINK_SOURCES) == {sheet.link for sheet in SHEETS.values()}


def test_inputs_on_the_host_are_in_its_memory_and_on_the_link():
    """Of 28 blocks' inputs 27 leave, and two are on their way beside the last."""
    asked = question(LLAMA_3B, "h200", devices=1, free=None, micro_batch=8)
    work = asked.workload
    one = work.tokens * 2 * asked.shape.hidden
    found = {}
    for inputs in Inputs:
        setup = Setup(
            stage=0,
            optimizer=Home.DEVICE,
            weights=Home.DEVICE,
            workload=replace(work, inputs=inputs),
        )
        tiers = tier_bytes(asked.shape, setup)
        step = step_forecast(asked.shape, setup, profile=asked.profile)
        found[inputs] = tiers, step
    here, there = found[Inputs.DEVICE], found[Inputs.HOST]
    assert there[0].host == {"activations": 27 * one}
    assert here[0].host == {}
    assert here[0].device["activations"] - there[0].device["activations"] in (0, 25 * one)
    assert there[1].busy["down"] == pytest.approx(27 * one / asked.profile.link.down, rel=0.01)
    assert here[1].busy["down"] == 0
    assert there[1].seconds == pytest.approx(here[1].seconds, rel=0.01)


def test_a_plan_for_405b_on_64_nodes_takes_less_than_a_second(tmp_path):
    """The whole command, in a process of its own: nothing is remembered from a plan before."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_405B))
    words = ["plan", str(tmp_path), "--machine", "h100", "--nodes", "64", "--sequence", "4096"]
    for last in (False, False, False, False, True):
        # Processor time: what else runs on the machine hardly counts, and less the next time.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        text = subprocess.run(
            [sys.executable, "-m", "forebay", *words], check=True, capture_output=True, text=True
        ).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert text.startswith("Yes, this fits: all 406 billion parameters train on 512 devices")
        if took < 1.0:
            return
        assert not last, f"{took:.2f} s"


def test_advice_asks_for_no_second_that_is_known():
    """What more memory would buy changes no second of the ways that fit already."""
    asked = question(LLAMA_8B, "h100")
    choice = choose(asked)
    _step_forecast.cache_clear()
    again = choose(asked)
    tried = _step_forecast.cache_info().misses
    margins(again)
    assert _step_forecast.cache_info().misses == tried > 0
    assert again == choice


def test_the_order_of_choice():
    """Nothing offloaded, then the optimizer, then weights; drives last."""
    asked = {
        "fits": question(LLAMA_8B, "h200", devices=1),
        "state is too large": question(LLAMA_8B | {"num_hidden_layers": 64}, "h200", devices=1),
        "weights are too": question(LLAMA_8B, "4090", sequence=1024),
        "host is too small": question(LLAMA_8B | {"num_hidden_layers": 64}, "4090"),
    }
    best = {name: choose(one).best.setup for name, one in asked.items()}
    found = {name: (setup.optimizer, setup.weights) for name, setup in best.items()}
    assert found == {
        "fits": (Home.DEVICE, Home.DEVICE),
        "state is too large": (Home.HOST, Home.DEVICE),
        "weights are too": (Home.HOST, Home.HOST),
        "host is too small": (Home.NVME, Home.HOST),
    }


def test_layer_order_stands_beside_the_usual_one_where_an_update_has_several_micro_batches():
    asked = question(LLAMA_3B, "4090", free=None, micro_batch=1, accumulation=8, sequence=1024)
    by_label = {one.setup.label: one for one in choose(asked).all}
    usual = by_label["stage 3, optimizer on host, weights on host"]
    layer = by_label["stage 3, optimizer on host, weights on host, layer order"]
    # weights go up twice an update and not 16 times; boundaries of all micro-batches are kept
    assert layer.seconds < 0.8 * usual.seconds
    kept, most = (activations(asked.shape, one.setup.workload).kept for one in (usual, layer))
    assert most == 8 * kept
    assert config_of(choose(asked), layer)["forebay"]["accumulation_order"] == "layer"
    one = replace(asked, workload=replace(asked.workload, accumulation=1))
    assert not any("layer order" in found.setup.label for found in choose(one).all)


def test_layer_order_gathers_weights_of_ranks_once_an_update():
    asked = question(LLAMA_8B, "4090", nodes=8, micro_batch=1, accumulation=8, free=None)
    by_label = {one.setup.label: one for one in choose(asked).all}
    usual = by_label["stage 3, optimizer on nvme, weights on nvme"]
    layer = by_label["stage 3, optimizer on nvme, weights on nvme, layer order"]
    # forward and backward gather all weights: twice in an update, or twice in each of eight passes
    assert layer.seconds < 0.8 * usual.seconds


def test_layer_order_is_not_tried_where_computation_is_all_there_is():
    bound = choose(question(LLAMA_8B, "h100"))
    assert any(one.setup.label == "stage 3" for one in bound.all)
    assert not any("layer order" in one.setup.label for one in bound.all)


@pytest.mark.parametrize("machine", ["h100", "v100-32", "gh200", "a100-80"])
def test_the_choice_beats_or_ties_all_that_fit(machine):
    choice = choose(question(LLAMA_3B, machine))
    assert choice.best is not None
    fitting = [one for one in choice.all if one.step]
    assert choice.best.seconds * 0.95 <= min(one.seconds for one in fitting)
    for one in choice.all:
        assert one.reason
        assert bool(one.short) is (one.verdict is Verdict.TOO_LARGE)


def test_one_process_takes_what_the_engine_reserves():
    asked = question(LLAMA_3B, "h200", devices=1)
    for optimizer, accumulation in itertools.product((Home.DEVICE, Home.HOST), (1, 4)):
        setup = Setup(
            stage=2,
            optimizer=optimizer,
            weights=Home.DEVICE,
            workload=replace(asked.workload, accumulation=accumulation),
        )
        tiers = tier_bytes(asked.shape, setup)
        for (tier, role), nbytes in forecast(placement_of(asked.shape, setup)).items():
            assert getattr(tiers, tier)[role] == nbytes


def test_measured_seconds_of_an_h200_are_forecast():
    """`benchmarks/results/one_step-h200-torch2.11.md`: four micro-batches without offload."""
    setup = Setup(
        stage=0,
        optimizer=Home.DEVICE,
        weights=Home.DEVICE,
        workload=Workload(micro_batch=8, sequence=2048, accumulation=4),
    )
    shape = question(LLAMA_3B, "h200").shape
    found = step_forecast(shape, setup, profile=CATALOG["h200"])
    assert found.seconds == pytest.approx(3.761, rel=0.10)
    assert found.bound == "computation"


def test_more_of_a_thing_never_takes_longer():
    asked = question(LLAMA_8B, "4090", sequence=1024)
    choice = choose(asked)
    for change in margins(choice):
        assert change.seconds is not None
        assert change.seconds <= choice.best.seconds * (1 + 1e-9)
    # A drive more helps where drives bind: everything else is too small here.
    deep = question(LLAMA_8B | {"num_hidden_layers": 64}, "4090", sequence=1024)
    saved = {one.what: one.saves for one in margins(choose(deep))}
    assert saved["one more drive in each node"] > 0.2


def test_what_does_not_fit_says_how_much_and_what_would():
    asked = question(LLAMA_405B | {"num_hidden_layers": 12}, "4090")
    choice = choose(asked)
    assert choice.best is None
    assert "on this device (NVIDIA GeForce RTX 4090): the closest way still lacks" in sentence(
        choice
    )
    changes = nearest_changes(choice)
    assert changes
    text = as_text(choice)
    for change in changes:
        assert change.what in text
    assert as_dict(choice)["short_bytes"]


def test_is_offload_worth_it():
    fits_without = offload_worth(choose(question(LLAMA_3B, "h200", devices=1)))
    assert fits_without.sentence.startswith("No: everything fits without it")
    # The update hides under the forward: a tie.
    assert fits_without.slowdown == pytest.approx(1, abs=0.05)
    # 2 bytes down and 2 up for each parameter.
    assert fits_without.link_bytes == 4 * question(LLAMA_3B, "h200").shape.parameters
    needed = offload_worth(choose(question(LLAMA_8B, "4090")))
    assert needed.sentence.startswith("Yes")
    sgd = offload_worth(choose(question(LLAMA_3B, "h200", devices=1, optimizer="sgd")))
    assert sgd.sentence.startswith("No: this optimizer keeps no moments")


@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
def test_memory_that_is_short_is_named(tier):
    asked = question(LLAMA_8B, "4090")
    limits = capacity(asked.profile)
    tiers = choose(asked).all[-1].tiers
    assert fits(tiers, replace(limits, **{tier: tiers.total(tier)})) == {}
    assert fits(tiers, replace(limits, **{tier: tiers.total(tier) - 7})) == {tier: 7}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", list(Recompute))
def test_shards_get_smaller_with_more_devices(stage, recompute):
    shape = question(LLAMA_8B, "h100").shape
    work = Workload(recompute=recompute, precision=Precision.FP16)
    sizes = [
        tier_bytes(
            shape,
            Setup(
                stage=stage,
                optimizer=Home.DEVICE,
                weights=Home.DEVICE,
                workload=work,
                cluster=Cluster(devices_per_node=8, nodes=nodes),
            ),
        ).total("device")
        for nodes in (1, 2, 64)
    ]
    if stage == 0:
        # Padding for more ranks is all that changes.
        assert sizes == pytest.approx([sizes[0]] * 3, rel=0.01)
    else:
        assert sizes[0] > sizes[1] > sizes[2]


def test_what_a_node_shares_is_divided_by_its_devices():
    profile = CATALOG["v100-32"]
    work = Workload(precision=Precision.FP16)
    one, sixteen = (
        rank_rates(
            profile,
            Setup(
                stage=2,
                optimizer=Home.NVME,
                weights=Home.DEVICE,
                workload=work,
                cluster=Cluster(devices_per_node=devices),
            ),
        )
        for devices in (1, 16)
    )
    assert one.up == profile.link.up
    assert sixteen.up * 16 == pytest.approx(profile.link.up * profile.node.uplinks)
    for name in ("host_memory", "update", "read", "write"):
        assert getattr(sixteen, name) * 16 == pytest.approx(getattr(one, name))


def test_the_comparison_has_every_setup_and_its_curve(tmp_path):
    asked = question(LLAMA_8B, "a100-40", sequence=1024)
    table = comparison(asked)
    text = table.as_text()
    for one in table.choice.all:
        assert one.setup.label in text
        points = table.curves[one.setup.label]
        assert [point.devices for point in points] == [8, 16, 32, 64]
    rows = json.loads(table.as_json())
    assert [row["setup"] for row in rows] == [one.setup.label for one in table.choice.all]
    for name in ("compare.svg", "compare.png"):
        from forebay.observe.plan_picture import draw_comparison

        draw_comparison(tmp_path / name, table)
        assert (tmp_path / name).stat().st_size > 10_000
