"""Runs of `forebay train` that work: what is written, shown, saved, and to the bit the same."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli.train_inputs import (
    forebay,
    instruction_file,
    losses,
    metrics,
    model_config,
    model_folder,
    text_file,
)

if TYPE_CHECKING:
    from pathlib import Path

Captured = pytest.CaptureFixture[str]


def saved(run: Path) -> dict[str, torch.Tensor]:
    """The saved weights, loaded by transformers alone."""
    return dict(AutoModelForCausalLM.from_pretrained(run / "model").state_dict())


def test_text_from_scratch(tmp_path: Path, capsys: Captured) -> None:
    run = tmp_path / "run"
    ran = forebay(
        capsys, "train", "--model", model_config(tmp_path), "--data", text_file(tmp_path),
        "--output", run, "--steps", 12, "--lr", "1e-2", "--sequence-length", 32, "--json",
        "--eval-fraction", "0.1",
    )  # fmt: skip
    assert ran.code == 0
    summary = json.loads(ran.out)
    assert summary == json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["ended_by"]) == (12, None)
    # 2,402 tokens are 76 rows, 8 of them held out; 12 updates take 96 rows of the other 68.
    assert summary["position"] == {"epoch": 1, "row": 28}
    assert summary["eval_losses"][0]["step"] == 0
    assert summary["eval_losses"][-1]["step"] == 12
    assert summary["eval_losses"][-1]["loss"] < summary["eval_losses"][0]["loss"]
    assert set(summary["bytes_by_tier"]) == {"device", "host"}
    lines = [line for line in metrics(run) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[-1]["loss"] == summary["last_loss"] < lines[0]["loss"]
    assert all(line["grad_norm"] > 0 and line["applied"] for line in lines)
    # Warm-up from a tenth of the rate, the peak, then down to a tenth.
    assert lines[0]["learning_rate"] == pytest.approx(1e-3)
    assert lines[-1]["learning_rate"] == pytest.approx(1e-3)
    assert list((run / "tensorboard").iterdir())
    for word in (
        "optimizer.params.lr",
        "optimizer state (optim_states)",
        "tokens/s",
        "norm",
        "left",
        "model saved",
    ):
        assert word in ran.err
    # Once, with who decided what, and with what followed from the machine.
    table = [line.split() for line in ran.err.splitlines()]
    assert [row[2] for row in table if row[:1] == ["optimizer.params.lr"]] == ["caller"]
    [warm_up] = [row for row in table if row[:1] == ["scheduler.params.warmup_num_steps"]]
    assert warm_up[2] == "auto"
    [cores] = [row for row in table if row[:1] == ["zero_optimization.offload_optimizer.ratio"]]
    assert cores[2] == "derived"
    assert "warm_up_steps" not in ran.err
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert model(**tokenizer("line 1", return_tensors="pt")).logits.shape == (1, 7, 259)


def test_folder_of_a_run_holds_what_it_says(tmp_path: Path, capsys: Captured) -> None:
    run = tmp_path / "run"
    words = ["train", "--model", model_config(tmp_path), "--data", text_file(tmp_path)]
    words += ["--output", run, "--steps", 2, "--sequence-length", 32, "--quiet"]
    ran = forebay(capsys, *words)
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert {item.name for item in run.iterdir()} == {
        "resolved_config.json", "metrics.jsonl", "summary.json", "tensorboard", "model",
        "tokenizer",
    }  # fmt: skip
    assert "is not empty" in forebay(capsys, *words).refusal()[0]
    (run / "model" / "config.json").unlink()
    assert forebay(capsys, *words, "--overwrite").code == 0
    assert (run / "model" / "config.json").exists()
    assert len(list((run / "tensorboard").iterdir())) == 1


def test_resolved_configuration_is_the_whole_truth(tmp_path: Path, capsys: Captured) -> None:
    """A second run from the first one's resolved configuration gives the same weights."""
    words = ["train", "--model", model_folder(tmp_path / "model"), "--data", text_file(tmp_path)]
    words += ["--sequence-length", 32, "--steps", 5, "--quiet"]
    first = [*words, "--output", tmp_path / "a", "--lr", "1e-2", "--batch-size", 2]
    assert forebay(capsys, *first, "--accumulation", 2, "--set", "bf16.enabled=true").code == 0
    again = [*words, "--output", tmp_path / "b", "--config", tmp_path / "a/resolved_config.json"]
    assert forebay(capsys, *again).code == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    one, other = saved(tmp_path / "a"), saved(tmp_path / "b")
    assert {value.dtype for value in one.values()} == {torch.bfloat16}
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("settings", [{}, {"bf16.enabled": "true"}, {"fp16.enabled": "true"}])
def test_offload_changes_no_bit(tmp_path: Path, capsys: Captured, settings: dict[str, str]) -> None:
    words: list[Any] = ["train", "--model", model_folder(tmp_path / "model"), "--quiet"]
    words += ["--data", instruction_file(tmp_path), "--steps", 4, "--lr", "1e-2"]
    words += ["--batch-size", 3, "--accumulation", 2]
    for name, value in settings.items():
        words += ["--set", f"{name}={value}"]
    for offload in ("none", "cpu"):
        ran = forebay(capsys, *words, "--output", tmp_path / offload, "--offload", offload)
        assert ran.code == 0, ran.err
    assert losses(tmp_path / "none") == losses(tmp_path / "cpu")
    none, cpu = saved(tmp_path / "none"), saved(tmp_path / "cpu")
    assert all(torch.equal(none[name], cpu[name]) for name in none)


def test_fine_tuning_on_instructions(tmp_path: Path, capsys: Captured) -> None:
    run = tmp_path / "run"
    ran = forebay(
        capsys, "train", "--model", model_folder(tmp_path / "model"), "--data",
        instruction_file(tmp_path), "--output", run, "--epochs", 2, "--lr", "1e-2",
        "--gradient-checkpointing", "--eval-fraction", "0.2", "--eval-every", 4,
        "--save-every", 3, "--json",
    )  # fmt: skip
    assert ran.code == 0
    summary = json.loads(ran.out)
    # 48 rows, 8 a batch, twice.
    assert (summary["steps"], summary["position"]) == (12, {"epoch": 2, "row": 0})
    assert [entry["step"] for entry in summary["eval_losses"]] == [0, 4, 8, 12]
    assert summary["eval_losses"][-1]["loss"] < summary["eval_losses"][0]["loss"] * 0.8
    # Answers are three digits and the end; prompts are read and not learned.
    assert all(line["label_tokens"] == 8 * 4 for line in metrics(run) if "loss" in line)


@pytest.mark.parametrize("words", [("--pack",), ("--pad", "--truncate")])
def test_packing_and_padding(tmp_path: Path, capsys: Captured, words: tuple[str, ...]) -> None:
    ran = forebay(
        capsys, "train", "--model", model_config(tmp_path), "--data", instruction_file(tmp_path),
        "--output", tmp_path / "run", "--steps", 2, *words,
    )  # fmt: skip
    assert ran.code == 0
    says = "whole samples packed" if words == ("--pack",) else "one sample a row"
    assert says in ran.err


def test_large_data_goes_through_files(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", "--model", model_config(tmp_path), "--data", text_file(tmp_path)]
    words += ["--steps", 3, "--sequence-length", 32, "--quiet"]
    assert forebay(capsys, *words, "--output", tmp_path / "a").code == 0
    monkeypatch.setattr("forebay.train.corpus._SPILL_BYTES", 1)
    monkeypatch.setattr("forebay.data.tokens._BATCH_CHARACTERS", 100)
    assert forebay(capsys, *words, "--output", tmp_path / "b").code == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert not [item for item in (tmp_path / "b").iterdir() if item.name.startswith(("tmp", "."))]


def test_tokenizer_of_another_folder_without_a_pad_token(tmp_path: Path, capsys: Captured) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="a")
    wrapped.save_pretrained(tmp_path / "tokenizer")
    data = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "a " * (n % 3 + 1), "completion": "b"} for n in range(20)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran = forebay(
        capsys, "train", "--model", model_config(tmp_path), "--tokenizer", tmp_path / "tokenizer",
        "--data", data, "--output", tmp_path / "run", "--steps", 2,
    )  # fmt: skip
    assert ran.code == 0
    assert "no pad token: rows are filled with eos, and masked" in ran.err
    assert AutoTokenizer.from_pretrained(tmp_path / "run/model").eos_token == "<eos>"


def test_loss_that_is_not_finite_ends_the_run(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forebay.train.forward import sum_of_token_losses

    calls = []

    def nan_later(*tensors: torch.Tensor) -> torch.Tensor:
        calls.append(tensors)
        return sum_of_token_losses(*tensors) * (1.0 if len(calls) < 4 else float("nan"))

    monkeypatch.setattr("forebay.train.forward.sum_of_token_losses", nan_later)
    words = ["train", "--model", model_config(tmp_path), "--data", text_file(tmp_path)]
    words += ["--sequence-length", 32, "--output", tmp_path / "run", "--quiet"]
    ran = forebay(capsys, *words, "--eval-fraction", 0, "--steps", 6, "--accumulation", 2)
    error, hint = ran.refusal()
    assert ran.code == 1
    assert "the loss is nan at step 2 of 6; no weight was changed by it" in error
    assert f"the model after 1 update is in {tmp_path / 'run/model'}" in error
    assert "--lr" in hint
    assert len(losses(tmp_path / "run")) == 1
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run/model") is not None


def test_updates_that_are_all_skipped_end_the_run(tmp_path: Path, capsys: Captured) -> None:
    """A loss can stay finite while no gradient is: such a run would seem to go well."""
    words = ["train", "--model", model_config(tmp_path), "--data", text_file(tmp_path)]
    words += ["--sequence-length", 32, "--output", tmp_path / "run", "--quiet"]
    words += ["--eval-fraction", 0, "--steps", 9, "--lr", "1e30", "--warmup-steps", 0]
    ran = forebay(capsys, *words, "--schedule", "constant")
    assert ran.code == 1
    assert "5 updates in a row were skipped, the last at step 6 of 9" in ran.refusal()[0]


def test_a_run_whose_loss_scale_never_fell_enough_is_no_success(
    tmp_path: Path, capsys: Captured
) -> None:
    words = ["train", "--model", model_config(tmp_path), "--data", text_file(tmp_path)]
    words += ["--sequence-length", 32, "--output", tmp_path / "run", "--quiet", "--steps", 6]
    words += ["--eval-fraction", 0, "--set", "fp16.enabled=true"]
    ran = forebay(capsys, *words, "--set", "fp16.initial_scale_power=32")
    error, hint = ran.refusal()
    assert ran.code == 1
    assert "all 6 updates were skipped: no gradient was finite, and the model is what" in error
    assert "fp16.initial_scale_power" in hint


def test_evaluation_that_is_not_finite_ends_the_run(tmp_path: Path, capsys: Captured) -> None:
    folder = model_folder(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    model.save_pretrained(folder)
    ran = forebay(
        capsys, "train", "--model", folder, "--data", text_file(tmp_path), "--output",
        tmp_path / "run", "--steps", 2, "--sequence-length", 32, "--quiet",
    )  # fmt: skip
    assert ran.code == 1
    assert "the evaluation loss is nan after 0 of 2 updates" in ran.refusal()[0]
    assert "nothing was trained yet, so nothing was saved" in ran.err


def test_disk_that_fills_up_keeps_the_earlier_save(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedModel

    good = PreTrainedModel.save_pretrained
    saves = []

    def fills_up(self: Any, folder: str, **settings: Any) -> None:
        saves.append(folder)
        good(self, folder, **settings)
        if len(saves) > 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", fills_up)
    run = tmp_path / "run"
    ran = forebay(
        capsys, "train", "--model", model_config(tmp_path), "--data", text_file(tmp_path),
        "--output", run, "--steps", 6, "--sequence-length", 32, "--save-every", 2, "--quiet",
    )  # fmt: skip
    error, hint = ran.refusal()
    assert ran.code == 1
    assert "cannot save the model to" in error
    assert "No space left on device" in error
    assert f"an earlier save is in {run / 'model'}" in error
    assert "are free there" in hint
    assert len(losses(run)) == 4
    assert AutoModelForCausalLM.from_pretrained(run / "model") is not None


def test_version_and_help(capsys: Captured) -> None:
    import forebay as package

    assert forebay(capsys, "--version") == (0, f"{package.__version__}\n", "")
    ran = forebay(capsys, "train", "--help")
    assert ran.code == 0
    assert "--gradient-checkpointing" in ran.out
    ran = forebay(capsys)
    assert ran.code == 2
    assert "train" in ran.out


def test_every_option_reaches_the_run() -> None:
    """The command's parameters are the fields of TrainOptions, but for four that are flags."""
    import dataclasses
    import inspect

    from forebay.cli.train import train
    from forebay.train.options import TrainOptions

    flags = {"lr", "pack", "overwrite", "as_json", "quiet"}
    fields = {"learning_rate", "packing", "existing_output"}
    parameters = set(inspect.signature(train).parameters) - flags
    assert parameters == {field.name for field in dataclasses.fields(TrainOptions)} - fields
