"""`forebay train` killed with -9 at any moment of any step, and resumed: the same bits as never."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cli.train_inputs import forebay, metrics, model_config, text_file
from forebay.cli.main import main
from train_worker import MOMENTS, run_until_killed

if TYPE_CHECKING:
    from pathlib import Path

_STEPS = 8
_ACCUMULATION = 2
_BESIDE = ["--set", "checkpoint.writer.decoupled=true"]


def _words(folder: Path, run: str, *more: Any) -> list[str]:
    """Shuffled data, two micro-batches per update, dropout; epochs end inside the run."""
    config = model_config(folder, attention_dropout=0.2)
    words = [
        "train", "--model", config, "--data", text_file(folder, 60), "--output", folder / run,
        "--steps", _STEPS, "--batch-size", 3, "--accumulation", _ACCUMULATION,
        "--sequence-length", 48, "--eval-fraction", "0.1", "--eval-every", 3, "--lr", "1e-2",
        "--save-every", 2, "--quiet", *more,
    ]  # fmt: skip
    return [str(word) for word in words]


def _results(run: Path) -> tuple[list[tuple[Any, ...]], dict[str, torch.Tensor]]:
    """Everything in metrics.jsonl but times, and the model."""
    from safetensors.torch import load_file

    series = [
        (line["step"], line.get("loss"), line.get("grad_norm"), line.get("eval_loss"))
        for line in metrics(run)
    ]
    return series, load_file(run / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert main(_words(folder, "whole")) == 0
    series, model = _results(folder / "whole")
    assert [line[0] for line in series if line[1] is not None] == list(range(1, _STEPS + 1))
    return series, model


def _killed(moment: str, count: int, words: list[str]) -> None:
    assert run_until_killed(moment, count, words) == -signal.SIGKILL


def _same(run: Path, whole: Any) -> None:
    series, model = _results(run)
    assert series == whole[0]
    assert model.keys() == whole[1].keys()
    assert all(torch.equal(model[name], value) for name, value in whole[1].items())


def test_killed_twice(tmp_path, capsys, whole):
    """In the fourth update's window, two updates after a save; then while the next is written."""
    _killed("in a window", 3 * _ACCUMULATION + 2, _words(tmp_path, "run"))
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "global_step2\n"
    words = _words(tmp_path, "run", "--resume")
    _killed("before a save is complete", 2, words)
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "global_step4\n"
    ran = forebay(capsys, *words)
    assert ran.code == 0, ran.err
    _same(tmp_path / "run", whole)


# How often each comes in a run that saves four times: its files, its manifest and `latest` are
# synced in each save.
_COUNTS = {
    "in a window": _STEPS * _ACCUMULATION,
    "before the update": _STEPS * _ACCUMULATION,
    "after the update": _STEPS,
    "before a save is written": 4,
    "while a save is written": 12,
    "before a save is complete": 4,
    "before latest": 4,
}


def _matrix():
    assert _COUNTS.keys() == MOMENTS.keys()
    for moment, most in _COUNTS.items():
        for count in range(1, most + 1):
            yield moment, count, []
            if most in {4, 12}:
                yield moment, count, _BESIDE


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("moment", "count", "more"), list(_matrix()))
def test_killed_anywhere(tmp_path, capsys, whole, moment, count, more):
    _killed(moment, count, _words(tmp_path, "run", *more))
    ran = forebay(capsys, *_words(tmp_path, "run", "--resume", *more))
    assert ran.code == 0, ran.err
    _same(tmp_path / "run", whole)
