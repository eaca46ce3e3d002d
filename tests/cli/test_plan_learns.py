"""From a measured machine over a run to a corrected profile: each file as the next one takes it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from cli.train_inputs import forebay, model_config, text_file
from forebay.hardware.profile import read_profile
from forebay.plan.run_record import read_record
from forebay.plan.setup import Home
from forebay.plan.tiers import tier_bytes
from forebay.probe.measuring import Effort, measure

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("weights", ["none", "cpu"])
def test_a_run_corrects_the_profile_that_it_ran_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], weights: str
) -> None:
    profile = tmp_path / "machine.json"
    effort = Effort(elements=1 << 18, link_bytes=4 << 20, repeats=1)
    profile.write_text(measure("cpu", effort=effort).as_json())
    config = tmp_path / "ds.json"
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": weights},
    }
    config.write_text(json.dumps({"zero_optimization": zero, "forebay": {"profile": str(profile)}}))
    run = tmp_path / "run"
    ran = forebay(
        capsys, "train", "--model", model_config(tmp_path), "--data", text_file(tmp_path),
        "--output", run, "--steps", 8, "--sequence-length", 32, "--config", config,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    record = read_record(run)
    assert record.setup.optimizer is Home.HOST
    assert record.setup.weights is (Home.HOST if weights == "cpu" else Home.DEVICE)
    before = read_profile(profile)
    assert record.predicted_seconds == pytest.approx(record.predict(before))
    said = json.loads((run / "plan.json").read_text())
    # memory is foretold to the byte, but for pages
    assert said["predicted"]["host_bytes"] == pytest.approx(record.measured.host_bytes, rel=0.03)
    placed = said["predicted"]["device_placed_bytes"]
    assert placed == pytest.approx(record.measured.device_bytes, rel=0.1)
    learned = forebay(capsys, "plan", "--learn", run, "--profile", profile)
    assert learned.code == 0, learned.err
    assert "predicted" in learned.out
    after = read_profile(profile)
    assert after.corrections.runs == 1
    assert record.predict(after) == pytest.approx(record.measured.seconds, rel=1e-3)


def test_inputs_that_wait_on_the_host_are_in_what_is_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "ds.json"
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    moves = {"cpu_checkpointing": True}
    config.write_text(json.dumps({"zero_optimization": zero, "activation_checkpointing": moves}))
    run = tmp_path / "run"
    ran = forebay(
        capsys, "train", "--model", model_config(tmp_path), "--data", text_file(tmp_path),
        "--output", run, "--steps", 4, "--sequence-length", 32, "--config", config,
        "--gradient-checkpointing",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    record = read_record(run)
    assert record.setup.workload.moves_inputs
    planned = tier_bytes(record.shape, record.setup, places=record.places)
    assert planned.host["activations"] > 0
    assert planned.total("host") == pytest.approx(record.measured.host_bytes, rel=0.03)


def test_a_plan_divides_state_between_memory_and_drives_as_the_run_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "ds.json"
    files = {"device": "nvme", "nvme_path": str(tmp_path), "ratio": 1.0}
    zero = {"stage": 3, "offload_optimizer": files, "offload_param": {"device": "cpu"}}
    config.write_text(json.dumps({"zero_optimization": zero, "forebay": {"host_budget": "21MiB"}}))
    model = model_config(
        tmp_path, hidden_size=128, num_hidden_layers=6, intermediate_size=512, num_attention_heads=4
    )
    run = tmp_path / "run"
    ran = forebay(
        capsys, "train", "--model", model, "--data", text_file(tmp_path), "--output", run,
        "--steps", 4, "--sequence-length", 32, "--config", config,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    record = read_record(run)
    assert record.setup.optimizer is Home.NVME
    use = record.measured.drives
    assert use is not None
    assert use.bytes_read > 0 < use.bytes_written
    assert 0 < use.read_seconds < 60 > use.write_seconds > 0
    planned = tier_bytes(record.shape, record.setup, places=record.places)
    assert planned.total("host") <= 21 << 20
    # some of it here, some there, and each side to within the pages that the engine rounds up to
    assert planned.host["optim_states"] and planned.nvme["optim_states"]
    assert planned.total("host") == pytest.approx(record.measured.host_bytes, rel=0.03)
