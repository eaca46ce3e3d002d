"""`forebay plan`: for people, for programs, and for those who mistype."""

from __future__ import annotations

import json
import re

import pytest
import torch

import forebay
from forebay.cli.main import main
from forebay.errors import ConfigError
from forebay.hardware.catalog import CATALOG
from forebay.plan.ready import not_built, ready_config
from forebay.plan.setup import Cluster, Setup
from forebay.plan.ways import candidates
from forebay.plan.workload import Precision, Workload
from plan_cases import LLAMA_8B, LLAMA_405B


def _run(capsys, *words):
    code = main(["plan", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def test_one_sentence_then_the_table_then_the_reasons(capsys, model):
    code, out, err = _run(capsys, model, "--machine", "4090", "--sequence", 1024)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("Yes, this fits: all 8.03 billion parameters train on this device")
    assert lines[1] == ""
    order = [
        out.index(part)
        for part in (
            "bytes by place and kind",
            "An update takes",
            "Why this one, and not another:",
            "What more would buy:",
            "Is offload worth it here?",
            "Mind:",
        )
    ]
    assert order == sorted(order)
    assert "-> stage 3, optimizer on host, weights on host" in out
    # The first sentence needs no word of the trade.
    for word in ("ZeRO", "stage", "shard", "offload", "Adam", "GiB"):
        assert word not in lines[0]


def test_what_does_not_fit(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_405B | {"num_hidden_layers": 12}))
    code, out, _ = _run(capsys, tmp_path, "--machine", "4090")
    assert code == 1
    assert out.startswith("Training all 42.5 billion parameters does not fit on this device")
    assert "The nearest changes that fit:" in out


def test_passes_that_wait_for_the_processor_are_told(capsys):
    """And what is told holds: so many times as many tokens take hardly longer."""

    def planned(sequences):
        words = ["1B", "--machine", "h200", "--devices", 1, "--sequence", 128]
        _, out, _ = _run(capsys, *words, "--batch", sequences, "--json")
        plan = json.loads(out)
        told = [one for one in plan["warnings"] if "waits for the processor to issue" in one]
        return plan["recommended"]["seconds"], told

    few, (told,) = planned(2)
    times = float(re.search(r"operations: (\S+) times as many", told).group(1))
    same, _ = planned(int(2 * times))
    assert same == pytest.approx(few, rel=0.1)
    many, none = planned(int(8 * times))
    assert many > 2 * few
    assert none == []


def test_json(capsys, model):
    _, out, _ = _run(capsys, model, "--machine", "h100", "--nodes", 2, "--batch", 32, "--json")
    plan = json.loads(out)
    assert plan["fits"] is True
    assert plan["config"]["train_batch_size"] == 32
    assert plan["recommended"]["verdict"] == "recommended"
    assert {one["label"] for one in plan["candidates"]} >= {"stage 0", "stage 3"}


def test_compare(capsys, model, tmp_path):
    picture = tmp_path / "compare.svg"
    words = ["--machine", "a100-40", "--compare", "--picture", picture]
    code, out, err = _run(capsys, model, *words)
    assert (code, err.strip()) == (0, f"wrote {picture}")
    assert "tokens per second on more devices" in out
    assert "GiB on each device" in picture.read_text() or picture.stat().st_size > 10_000


def test_a_written_profile_is_planned_for(capsys, model, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(CATALOG["h100"].as_json())
    by_name = _run(capsys, model, "--machine", "h100")
    assert _run(capsys, model, "--profile", path) == by_name


@pytest.mark.parametrize(
    ("count", "machine", "offloaded"),
    [
        ("3e9", "h200", set()),
        ("3e9", "4090", {"offload_optimizer"}),
        ("8.5e9", "4090", {"offload_optimizer", "offload_param"}),
    ],
    ids=["nothing", "optimizer", "weights"],
)
def test_the_written_configuration_trains(capsys, tmp_path, count, machine, offloaded):
    """The recommendation for a large model, tried on a tiny one."""
    path = tmp_path / "ready.json"
    words = [count, "--machine", machine, "--devices", 1, "--config", path]
    code, _, _ = _run(capsys, *words, "--batch", 8, "--sequence", 1024)
    assert code == 0
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    config = json.loads(path.read_text())
    assert set(config["zero_optimization"]) - {"stage"} == offloaded
    engine, *_ = forebay.initialize(model=model, config=config)
    with engine:
        for _ in range(2 * config["gradient_accumulation_steps"]):
            x = torch.ones(config["train_micro_batch_size_per_gpu"], 8, dtype=torch.bfloat16)
            engine.backward(engine(x).float().square().mean())
            engine.step()
        assert engine.global_steps == 2


@pytest.mark.parametrize("way", list(candidates(Cluster(), drives=True)), ids=str)
def test_every_way_in_one_process_runs_or_says_that_it_is_not_built(tmp_path, way):
    work = Workload(micro_batch=2, accumulation=2, precision=Precision.FP32, order=way.order)
    setup = Setup(stage=way.stage, optimizer=way.optimizer, weights=way.weights, workload=work)
    config = ready_config(setup)
    for key in ("offload_optimizer", "offload_param"):
        if "nvme_path" in config["zero_optimization"].get(key, {}):
            config["zero_optimization"][key]["nvme_path"] = str(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    if not_built(setup):
        with pytest.raises(ConfigError, match="not supported yet"):
            forebay.initialize(model=model, config=config)
        return
    engine, *_ = forebay.initialize(model=model, config=config)
    with engine:
        for _ in range(2):
            batches = iter([torch.ones(2, 8)] * 2)
            engine.train_batch(batches, lambda x: engine(x).square().mean())
        assert engine.global_steps == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["7e9"], "a plan needs a machine: give --machine or --profile"),
        (["7e9", "--machine", "h100", "--profile", "x.json"], "h100 .* x.json are two machines"),
        (
            ["7e9", "--machine", "h100", "--optimizer", "lion", "--config", "x.json"],
            "does not run the optimizer lion yet: there is no configuration to write",
        ),
        (["7e9", "--machine", "a1"], "--machine 'a1' is not in the catalog, which knows v100-32"),
        (["nowhere", "--machine", "h100"], "nowhere is neither a file or folder nor a parameter"),
        (["0", "--machine", "h100"], "parameters is 0; it must be a whole number from 1"),
        (["1e30", "--machine", "h100"], "parameters is"),
        (["1e400", "--machine", "h100"], "parameters is 1e400, which is more than any machine"),
        (["7e9", "--machine", "h100", "--picture", "x.svg"], "--picture draws a comparison"),
        (
            ["7e9", "--machine", "h100", "--compare", "--picture", "x.txt"],
            "x.txt is neither a .svg nor a .png file",
        ),
        (["7e9", "--machine", "h100", "--config", "/no/x.json"], "a folder that is not there"),
        (["7e9", "--machine", "h100", "--config", "x.json", "--compare"], "the recommended way"),
        (["7e9", "--machine", "h100", "--nodes", "0"], "--nodes is 0; .* from 1 to 100,000"),
        (["7e9", "--machine", "h100", "--devices", "-3"], "--devices is -3; .* from 1 to 1,024"),
        (["7e9", "--machine", "h100", "--batch", "-8"], "--batch is -8; .* from 1 to"),
        (["7e9", "--machine", "h100", "--batch", "12"], "on 8 devices it must be a multiple of 8"),
        (["7e9", "--machine", "h100", "--sequence", "0"], "--sequence is 0; .* from 1 to"),
        (["7e9", "--machine", "h100", "--micro-batch", "0"], "--micro-batch is 0"),
        (["7e9", "--machine", "h100", "--precision", "fp8"], "--precision is 'fp8'; .* bf16, fp16"),
        (["7e9", "--machine", "h100", "--optimizer", "x"], "--optimizer is 'x'; .* one of adamw"),
        (["7e9", "--machine", "h100", "--recompute", "x"], "--recompute is 'x'; .* none, blocks"),
        (["7e9", "--machine", "v100-32", "--precision", "bf16"], "no rate for bfloat16"),
        (["7e9", "--machine", "h100", "--hidden", "0"], "--hidden is 0; .* from 1 to"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_line_with_field_and_range(capsys, words, message):
    import re

    code, out, err = _run(capsys, *words)
    assert (code, out) == (2, "")
    first, *rest = err.strip().splitlines()
    assert re.search(message, first), first
    assert len(rest) <= 1


@pytest.mark.parametrize(
    ("batch", "hint"), [(3, "the smallest is 8"), (12, "the nearest are 8 and 16")]
)
def test_a_batch_that_devices_cannot_divide_is_answered_with_one_that_they_can(capsys, batch, hint):
    _, _, err = _run(capsys, "7e9", "--machine", "h100", "--batch", batch)
    assert err.strip().endswith(f"hint: {hint}")


def test_profiles_of_another_version_are_refused(capsys, tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(json.loads(CATALOG["h100"].as_json()) | {"version": 1}))
    code, _, err = _run(capsys, "7e9", "--profile", path)
    assert code == 2
    assert "is a profile of version 1, and this forebay reads version 3" in err


def test_an_optimizer_that_is_not_built_has_a_forecast_and_no_configuration(capsys):
    code, out, _ = _run(capsys, "7e9", "--machine", "h100", "--optimizer", "lion", "--json")
    found = json.loads(out)
    assert code == 0
    assert "config" not in found
    assert found["recommended"]["not_built"] == "the optimizer lion"


def test_more_devices_than_the_machine_has_are_said(capsys):
    _, out, _ = _run(capsys, "7e9", "--machine", "h100", "--devices", 9)
    assert "this machine has 8 devices, not 9" in out
    for devices in (1, 8):
        _, out, _ = _run(capsys, "7e9", "--machine", "h100", "--devices", devices)
        assert "this machine has" not in out


def test_the_configuration_names_units_of_a_model_that_was_read(capsys, tmp_path):
    shape = {
        "model_type": "llama",
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    words = ["--machine", "4090", "--sequence", 1024, "--json"]
    _, out, _ = _run(capsys, tmp_path, *words)
    units = json.loads(out)["config"]["forebay"]["streamed_units"]
    assert units == list(range(len(units)))
    assert 0 < len(units) < 30
    _, out, _ = _run(capsys, "3.2e9", *words)
    assert "forebay" not in json.loads(out)["config"]


def test_a_machine_may_have_other_memory_and_drives(capsys):
    _, plain, _ = _run(capsys, "8B", "--machine", "4090", "--json")
    _, other, _ = _run(
        capsys, "8B", "--machine", "4090", "--host-memory", "64GiB", "--drives", 2, "--json"
    )
    before, after = json.loads(plain)["capacity_bytes"], json.loads(other)["capacity_bytes"]
    assert before["host"] == 2 * after["host"]
    assert after["nvme"] == 2 * before["nvme"]
    assert json.loads(other)["recommended"]["optimizer"] == "nvme"
    code, none, _ = _run(
        capsys, "8B", "--machine", "4090", "--host-memory", "64GiB", "--drives", 0, "--json"
    )
    assert code == 1
    assert json.loads(none)["capacity_bytes"]["nvme"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--host-memory", "64MiB"), "--host-memory is 64.0 MiB; it must be from 1.0 GiB"),
        (("--drives", "-1"), "--drives is -1; it must be a whole number from 0 to 1,024"),
    ],
)
def test_other_memory_and_drives_within_reason(capsys, words, said):
    code, _, err = _run(capsys, "8B", "--machine", "4090", *words)
    assert code == 2
    assert said in err
