"""`forebay train --resume`: killed or stopped at any step, the same losses as uninterrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cli.train_inputs import forebay, losses, metrics, model_config, text_file
from forebay.cli.main import main
from forebay.train.options import SaveEvery

if TYPE_CHECKING:
    from pathlib import Path

_STEPS = 9


def _words(tmp_path: Path, run: str, *more: Any) -> list[Any]:
    """Shuffled data, accumulation, dropout, evaluation; epochs end inside the run."""
    config = model_config(tmp_path, attention_dropout=0.2)
    return [
        "train", "--model", config, "--data", text_file(tmp_path, 60), "--output", tmp_path / run,
        "--steps", _STEPS, "--batch-size", 3, "--accumulation", 2, "--sequence-length", 48,
        "--eval-fraction", "0.1", "--eval-every", 2, "--lr", "1e-2", "--quiet", *more,
    ]  # fmt: skip


def saved(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run / "model" / "model.safetensors")


def _series(run: Path) -> list[tuple[Any, ...]]:
    """Everything in metrics.jsonl but times."""
    return [
        (line["step"], line.get("loss"), line.get("grad_norm"), line.get("eval_loss"))
        for line in metrics(run)
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert main([str(word) for word in _words(folder, "whole")]) == 0
    return folder / "whole"


def _stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    from forebay.train.report import RunReporter

    report = RunReporter.step

    def step_then_stop(self: Any, record: Any) -> None:
        report(self, record)
        if record.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunReporter, "step", step_then_stop)


# In the middle of an epoch and of the time between evaluations, and where one is due.
_QUICK_STEPS = (4, 5)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(step, marks=[] if step in _QUICK_STEPS else [pytest.mark.slow])
        for step in range(1, _STEPS)
    ],
)
def test_stopped_at_any_step(tmp_path, capsys, monkeypatch, whole, step):
    with monkeypatch.context() as patch:
        _stop_after(patch, step)
        ran = forebay(capsys, *_words(tmp_path, "run"))
        assert ran.code == 143
    assert len(losses(tmp_path / "run")) == step
    ran = forebay(capsys, *_words(tmp_path, "run", "--resume"))
    assert ran.code == 0, ran.err
    assert _series(tmp_path / "run") == _series(whole)
    expected, found = saved(whole), saved(tmp_path / "run")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    summaries = [
        json.loads((run / "summary.json").read_text()) for run in (whole, tmp_path / "run")
    ]
    for name in ("steps", "tokens", "position", "first_loss", "last_loss", "eval_losses"):
        assert summaries[0][name] == summaries[1][name]


def test_killed_between_saves(tmp_path, whole):
    """kill -9: lines of metrics after the checkpoint are dropped, and come again."""
    words = [str(word) for word in _words(tmp_path, "run", "--save-every", 2, "--steps", 100_000)]
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "forebay", *words], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "checkpoints" / "latest").exists():
            break
        time.sleep(0.02)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL, process.stderr.read()
    process.stderr.close()
    assert not (run / "summary.json").exists()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # a line that the kill tore
    words = [*words, "--resume", "auto", "--steps", str(_STEPS)]
    done = subprocess.run(
        [sys.executable, "-m", "forebay", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    steps = [line["step"] for line in metrics(run) if "loss" in line]
    assert steps == list(range(1, _STEPS + 1))


def test_resume_without_a_checkpoint_starts_anew(tmp_path, capsys, whole):
    words = [word for word in _words(tmp_path, "run", "--resume") if word != "--quiet"]
    ran = forebay(capsys, *words)
    assert ran.code == 0
    assert "no checkpoint to go on from: the run starts anew" in ran.err
    assert _series(tmp_path / "run") == _series(whole)


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path, capsys, whole):
    run = tmp_path / "run"
    assert forebay(capsys, *_words(tmp_path, "run", "--save-every", 3)).code == 0
    assert sorted(item.name for item in (run / "checkpoints").iterdir()) == [
        "global_step6", "global_step9", "latest",
    ]  # fmt: skip
    file = run / "checkpoints" / "global_step9" / "tensors-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    words = [word for word in _words(tmp_path, "run", "--resume") if word != "--quiet"]
    ran = forebay(capsys, *words)
    assert ran.code == 0, ran.err
    assert "global_step9/tensors-00000.safetensors is damaged" in ran.err.replace("\n", "")
    assert "going on after 6 updates" in ran.err
    assert _series(run) == _series(whole)


def test_from_a_path_into_another_folder(tmp_path, capsys, whole):
    assert forebay(capsys, *_words(tmp_path, "run", "--save-every", 4)).code == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "global_step8"
    ran = forebay(capsys, *_words(tmp_path, "other", "--resume", checkpoint))
    assert ran.code == 0, ran.err
    assert _series(tmp_path / "other") == _series(whole)[-3:]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seed", 5], "seed was 0, and is 5"),
        (["--batch-size", 2], "rows of an update was 6, and is 4"),
        (["--overwrite"], "--resume goes on with a former run and --overwrite replaces it"),
        (["--resume", "nowhere"], "nowhere is no folder"),
    ],
)
def test_other_runs_are_refused(tmp_path, capsys, more, message):
    assert forebay(capsys, *_words(tmp_path, "run", "--save-every", 4)).code == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    error, _ = forebay(capsys, *_words(tmp_path, "run", "--resume", *more)).refusal()
    assert message in error
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", SaveEvery(steps=7)),
        ("30min", SaveEvery(seconds=1800)),
        ("0.5 minutes", SaveEvery(seconds=30)),
    ],
)
def test_how_often(text, expected):
    assert SaveEvery.parse(text) == expected


@pytest.mark.parametrize("text", ["often", "0min", "1.5", "-3", "3s"])
def test_how_often_makes_no_sense(tmp_path, capsys, text):
    error, _ = forebay(capsys, *_words(tmp_path, "run", f"--save-every={text}")).refusal()
    assert "--save-every" in error


def test_saves_by_time(tmp_path, capsys):
    ran = forebay(capsys, *_words(tmp_path, "run", "--save-every", "0.0001min"))
    assert ran.code == 0
    assert (tmp_path / "run" / "checkpoints" / "global_step9").is_dir()
