"""`forebay train` on several ranks trains as one process does with all their rows at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.train_inputs import losses, metrics, model_config, model_folder, text_file
from distributed import ranks, scripts

_COMMON = ("--steps", "4", "--sequence-length", "32", "--lr", "1e-3", "--seed", "3")


def _words(folder: Path, *more: str) -> list[str]:
    given = ("--model", str(folder / "model"), "--data", str(folder / "text.txt"))
    return [*given, *_COMMON, *more]


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_three_ranks_train_as_one_process_with_their_rows(tmp_path, stage):
    model_folder(tmp_path / "model")
    text_file(tmp_path)
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"zero_optimization": zero, "optimizer": {"type": "AdamW"}}))
    many, one = tmp_path / "many", tmp_path / "one"
    flags = ("--config", str(config), "--device", "cpu")
    words = _words(tmp_path, *flags, "--batch-size", "2", "--output", str(many))
    assert ranks.run(3, scripts.command_line, words, seconds=150) == [0, 0, 0]
    alone = _words(tmp_path, *flags, "--batch-size", "6", "--output", str(one))
    assert scripts.command_line(alone) == 0
    # one float32 mean over all rows, or a sum of three: a few units in the last place
    assert losses(many) == pytest.approx(losses(one), rel=1e-5)
    evaluated = [[m["eval_loss"] for m in metrics(run) if "eval_loss" in m] for run in (many, one)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)
    left, right = (load_file(run / "model" / "model.safetensors") for run in (many, one))
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.allclose(value, right[name], rtol=1e-3, atol=1e-4), name


@pytest.mark.slow
def test_ranks_that_start_from_scratch_make_the_model_of_one_process(tmp_path):
    path = model_config(tmp_path, hidden_size=128, intermediate_size=512)
    text_file(tmp_path)
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"zero_optimization": zero, "optimizer": {"type": "AdamW"}}))
    many, one = tmp_path / "many", tmp_path / "one"
    given = ["--model", str(path), "--data", str(tmp_path / "text.txt"), *_COMMON]
    given += ["--config", str(config), "--device", "cpu"]
    words = [*given, "--batch-size", "2", "--output", str(many)]
    assert ranks.run(3, scripts.command_line, words, seconds=150) == [0, 0, 0]
    assert scripts.command_line([*given, "--batch-size", "6", "--output", str(one)]) == 0
    assert losses(many) == pytest.approx(losses(one), rel=1e-5)


@pytest.mark.slow
def test_layer_order_trains_the_same_model(tmp_path):
    """Stage 3 with weights on the hosts, and stage 1 one micro-batch after the other (law 1b)."""
    model_folder(tmp_path / "model")
    text_file(tmp_path)
    host, found = {"device": "cpu"}, []
    for order, more in (
        ("microbatch", {"stage": 1}),
        ("layer", {"stage": 3, "offload_param": host}),
    ):
        config = {
            "zero_optimization": {"offload_optimizer": host, **more},
            "optimizer": {"type": "AdamW"},
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 3,
            "forebay": {"accumulation_order": order},
        }
        path, run = tmp_path / f"{order}.json", tmp_path / order
        path.write_text(json.dumps(config))
        words = _words(tmp_path, "--config", str(path), "--device", "cpu", "--output", str(run))
        assert ranks.run(3, scripts.command_line, words, seconds=150) == [0, 0, 0]
        found.append((losses(run), load_file(run / "model" / "model.safetensors")))
    (left_losses, left), (right_losses, right) = found
    assert left_losses == right_losses
    assert left.keys() == right.keys()
    assert all(torch.equal(value, right[name]) for name, value in left.items())


@pytest.mark.slow
def test_torchrun_runs_the_command(tmp_path):
    model_folder(tmp_path / "model")
    text_file(tmp_path)
    words = _words(
        tmp_path, "--batch-size", "2", "--device", "cpu", "--output", str(tmp_path / "r")
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, "--master-port", str(ranks.free_port()), "-m", "forebay", "train", *words],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert len(losses(tmp_path / "r")) == 4
