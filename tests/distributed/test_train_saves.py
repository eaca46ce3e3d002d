"""`forebay train` over ranks saves, is stopped or killed, and goes on with the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cli.train_inputs import metrics, model_config, text_file
from distributed import ranks, scripts

_STEPS = 6
_LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]


def _words(folder: Path, run: str, *more: Any) -> list[str]:
    """Shuffled data, two micro-batches per update, dropout; epochs end inside the run."""
    config = model_config(folder, attention_dropout=0.2)
    words = [
        "--model", config, "--data", text_file(folder, 60), "--output", folder / run,
        "--steps", _STEPS, "--batch-size", 2, "--accumulation", 2, "--sequence-length", 48,
        "--eval-fraction", "0.1", "--eval-every", 3, "--lr", "1e-2", "--save-every", 2,
        "--device", "cpu", *more,
    ]  # fmt: skip
    return [str(word) for word in words]


def _stage(stage: int) -> list[str]:
    return ["--set", f"zero_optimization.stage={stage}"]


def _results(run: Path) -> tuple[list[tuple[Any, ...]], dict[str, torch.Tensor]]:
    """Everything in metrics.jsonl but times, and the model."""
    series = [
        (line["step"], line.get("loss"), line.get("grad_norm"), line.get("eval_loss"))
        for line in metrics(run)
    ]
    return series, load_file(run / "model" / "model.safetensors")


def _assert_same(left: Path, right: Path) -> None:
    (series, model), (others, other) = _results(left), _results(right)
    assert [line[0] for line in series if line[1] is not None] == list(range(1, _STEPS + 1))
    assert series == others
    assert model.keys() == other.keys()
    assert all(torch.equal(model[name], value) for name, value in other.items())


def test_a_signal_to_one_rank_stops_all_and_they_go_on(tmp_path):
    words = [_words(tmp_path, run, *_stage(3)) for run in ("whole", "stopped")]
    assert ranks.run(2, scripts.command_line, words[0], seconds=150) == [0, 0]
    stopped = ranks.run(2, scripts.stopped_command_line, words[1], 3, 1, seconds=150)
    assert stopped == [128 + signal.SIGTERM] * 2
    assert (tmp_path / "stopped" / "checkpoints" / "latest").read_text() == "global_step3\n"
    again = [*words[1], "--resume"]
    assert ranks.run(2, scripts.command_line, again, seconds=150) == [0, 0]
    _assert_same(tmp_path / "whole", tmp_path / "stopped")
    # and on one rank, with the rows of both: the same data from there on, sums in another order
    alone = [*_words(tmp_path, "one"), "--batch-size", "4", "--resume"]
    step = tmp_path / "stopped" / "checkpoints" / "global_step4"
    assert scripts.command_line([*alone, str(step)]) == 0
    series = [loss for number, loss, *_ in _results(tmp_path / "one")[0] if loss is not None]
    assert len(series) == _STEPS - 4


def test_what_rank_0_refuses_all_refuse(tmp_path):
    """The output folder is in use: nobody waits for the others."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("x")
    began = time.monotonic()
    assert ranks.run(2, scripts.command_line, _words(tmp_path, "run"), seconds=60) == [2, 2]
    assert time.monotonic() - began < 30


def test_a_rank_that_waits_for_the_others_hears_signals_and_does_not_wait_for_ever():
    (heard,) = ranks.collect(ranks.start(2, scripts.joins_alone, 30.0, only=[1]), seconds=40)
    assert heard == ("ok", "Interrupted: SIGTERM")
    (late,) = ranks.collect(ranks.start(2, scripts.joins_alone, 0.5, only=[1]), seconds=40)
    assert late[0] == "ok"
    assert late[1].startswith("RankError: rank 1 of 2 waited 0.5 s for the others")


def _torchrun(words: list[str], size: int = 2) -> list[str]:
    port = ["--master-port", str(ranks.free_port())]
    return [*_LAUNCH, str(size), *port, "-m", "forebay", "train", *words]


def _latest(run: Path) -> str:
    try:
        return (run / "checkpoints" / "latest").read_text().strip()
    except OSError:
        return ""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("how", ["killed", "terminated", "interrupted"])
def test_torchrun_killed_and_resumed(tmp_path, stage, how):
    """All of it at once with -9, or a signal that torchrun passes on."""
    words = {run: _words(tmp_path, run, *_stage(stage)) for run in ("whole", "ended")}
    done = subprocess.run(
        _torchrun(words["whole"]), capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    process = subprocess.Popen(
        _torchrun(words["ended"]), stderr=subprocess.DEVNULL, start_new_session=True
    )
    until = time.monotonic() + 120
    while _latest(tmp_path / "ended") != "global_step2" and time.monotonic() < until:
        time.sleep(0.01)
    if how == "killed":
        workers = _children(process.pid)
        for pid in [process.pid, *workers]:
            os.kill(pid, signal.SIGKILL)
    else:
        process.send_signal(signal.SIGTERM if how == "terminated" else signal.SIGINT)
    process.wait(60)
    assert _latest(tmp_path / "ended")
    again = subprocess.run(
        _torchrun([*words["ended"], "--resume"]),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert again.returncode == 0, again.stderr[-3000:]
    assert "going on after" in again.stderr
    _assert_same(tmp_path / "whole", tmp_path / "ended")


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]
