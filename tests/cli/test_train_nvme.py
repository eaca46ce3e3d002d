"""`forebay train` with state and weights in files: as anywhere else, and refused in one line."""

from __future__ import annotations

import json
import resource

import pytest

from cli.train_inputs import forebay, model_config, text_file


def _train(folder, capsys, name, *, zero, steps=2, **model):
    config = folder / f"{name}.json"
    config.write_text(json.dumps({"zero_optimization": zero, "gradient_clipping": 1.0}))
    return forebay(
        capsys, "train", "--quiet", "--model", model_config(folder, **model),
        "--data", text_file(folder), "--output", folder / name, "--config", config,
        "--steps", steps, "--json",
    )  # fmt: skip


def _both(path, **param):
    return {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": str(path), "buffer_size": 65536},
        "offload_param": {"device": "nvme", "max_in_cpu": 0, **param},
    }


def _losses(folder, name):
    rows = (folder / name / "metrics.jsonl").read_text().splitlines()
    keys = ("loss", "grad_norm", "eval_loss")
    return [{key: row[key] for key in keys if key in row} for row in map(json.loads, rows)]


def test_a_run_with_all_in_files_is_the_run_without(tmp_path, capsys):
    state = tmp_path / "state"
    state.mkdir()
    assert _train(tmp_path, capsys, "plain", zero={"stage": 3}).code == 0
    ran = _train(tmp_path, capsys, "files", zero=_both(state))
    assert ran.code == 0, ran.err
    losses = _losses(tmp_path, "files")
    assert losses == _losses(tmp_path, "plain")
    assert any("loss" in row for row in losses)
    assert list(state.iterdir()) == []
    weights = [
        (tmp_path / name / "model" / "model.safetensors").read_bytes()
        for name in ("plain", "files")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone", "nvme_path names gone, which does not exist"),
        ("file", "nvme_path names file, which is a file"),
        ("a\0b", "no path has a zero byte"),
        (["one", "./one/../one"], "nvme_path names one and one/../one, which are one folder"),
        (["gone", "gone"], "nvme_path names gone 2 times: a striped set has each folder once"),
    ],
    ids=str,
)
def test_a_path_that_is_no_folder_is_a_wrong_configuration(
    path, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "one").mkdir()
    zero = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": path}}
    ran = _train(tmp_path, capsys, "run", zero=zero)
    error, hint = ran.refusal()
    assert (ran.code, message in error, bool(hint)) == (2, True, True), ran.err
    assert not (tmp_path / "run").exists()


@pytest.fixture
def _no_data(monkeypatch):
    monkeypatch.setattr(
        "forebay.train.run.load_corpus", lambda *a, **k: pytest.fail("data was read")
    )


@pytest.mark.usefixtures("_no_data")
def test_a_folder_that_cannot_be_written_is_found_before_data_is_read(tmp_path, capsys):
    zero = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/proc"}}
    error, _ = (ran := _train(tmp_path, capsys, "run", zero=zero)).refusal()
    assert ran.code == 1
    assert "cannot make a state file in /proc" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("_no_data")
def test_a_folder_that_cannot_be_looked_at_is_found_before_data_is_read(tmp_path, capsys):
    zero = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "x" * 300}}
    error, _ = (ran := _train(tmp_path, capsys, "run", zero=zero)).refusal()
    assert (ran.code, "File name too long (errno 36)" in error) == (1, True)


@pytest.mark.usefixtures("_no_data")
def test_a_drive_without_room_is_found_before_data_is_read(tmp_path, capsys):
    # 3 x 32 x 2^40 elements in each of two layers, 12 bytes of state and 4 of weight
    ran = _train(tmp_path, capsys, "run", zero=_both(tmp_path), intermediate_size=1 << 40)
    error, hint = ran.refusal()
    assert ran.code == 1
    assert error.startswith(f"state takes 3.0 PiB in {tmp_path}, which has ")
    assert "add a path to nvme_path" in hint


@pytest.mark.usefixtures("_no_data")
def test_a_limit_on_files_is_found_before_data_is_read(tmp_path, capsys):
    zero = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (128 << 10, before[1]))
    try:
        ran = _train(tmp_path, capsys, "run", zero=zero)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    error, _ = ran.refusal()
    assert ran.code == 1
    assert "File too large (errno 27)" in error
