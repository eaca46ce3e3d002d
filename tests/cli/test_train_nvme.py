"""`forebay train` with state and weights in files: as anywhere else, and refused in one line."""

from __future__ import annotations

import json

import pytest

from cli.train_inputs import forebay, model_config, text_file


def _train(folder, capsys, name, *, zero, steps=2):
    config = folder / f"{name}.json"
    config.write_text(json.dumps({"zero_optimization": zero, "gradient_clipping": 1.0}))
    return forebay(
        capsys, "train", "--quiet", "--model", model_config(folder), "--data", text_file(folder),
        "--output", folder / name, "--config", config, "--steps", steps, "--json",
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
