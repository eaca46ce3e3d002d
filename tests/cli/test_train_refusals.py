"""Bad input to `forebay train`: one line, a hint, exit code 2, and nothing written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from cli.train_inputs import (
    Ran,
    forebay,
    instruction_file,
    model_config,
    model_folder,
    text_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs `forebay train` on a good model and good text, but for the words given."""

    def run(*words: object, **changed: object) -> Ran:
        named = {
            "model": model_config(tmp_path),
            "data": text_file(tmp_path),
            "output": tmp_path / "run",
            "steps": 1,
        }
        named.update({name.replace("_", "-"): value for name, value in changed.items()})
        options = [
            word
            for name, value in named.items()
            if value is not None
            for word in (f"--{name}", value)
        ]
        return forebay(capsys, "train", "--quiet", *options, *words)

    return run


def config(folder: Path, **values: Any) -> Path:
    path = folder / "ds.json"
    path.write_text(json.dumps(values))
    return path


def refused(ran: Ran, message: str, hint: str = "") -> None:
    error, help_ = ran.refusal()
    assert ran.code == 2
    assert message in error
    assert hint in help_


def test_unknown_option_and_missing_option(
    train: Callable[..., Ran], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(train("--modle", "x"), "No such option: --modle", "forebay train --help")
    refused(train(lr="1.0x"), "--lr", "forebay train --help")
    refused(train(offload="disk"), "--offload")
    refused(forebay(capsys, "train", "--model", "x"), "--data", "forebay train --help")
    refused(forebay(capsys, "tarin"), "tarin", "forebay --help")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 2}, "--steps 1 and --epochs 2 both set the length"),
        ({"steps": None, "epochs": 0}, "--epochs must be above 0, got 0"),
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"batch_size": 0}, "--batch-size must be at least 1, got 0"),
        ({"accumulation": -1}, "--accumulation must be at least 1, got -1"),
        ({"eval_every": 0}, "--eval-every must be at least 1, got 0"),
        ({"save_every": 0}, "--save-every must be at least 1, got 0"),
        ({"sequence_length": 1}, "--sequence-length must be at least 2, got 1"),
        ({"sequence_length": 129}, "--sequence-length 129 is more than the model's context of 128"),
        ({"warmup_steps": -1}, "--warmup-steps must be at least 0, got -1"),
        ({"warmup_steps": 2}, "total_num_steps is 1, and warmup_num_steps is 2"),
        ({"lr": 0}, "--lr must be above 0, got 0"),
        ({"eval_fraction": 1}, "--eval-fraction must be from 0 to below 1, got 1"),
        ({"eval_fraction": 0.999}, "cannot hold out"),
        ({"device": "tpu"}, 'unknown device "tpu"'),
        ({"device": "cuda:99"}, "--device cuda:99, but this torch sees"),
        ({"set": "bf16.enabled"}, 'cannot read the override "bf16.enabled"'),
        ({"set": "zero_optimization.stage.x=1"}, "which is 2 and no section"),
    ],
)
def test_values_that_make_no_sense(
    train: Callable[..., Ran], options: dict[str, object], message: str
) -> None:
    refused(train(**options), message)


def test_configuration_is_strict(train: Callable[..., Ran], tmp_path: Path) -> None:
    mistyped = config(tmp_path, gradient_cliping=1.0)
    refused(train(config=mistyped), "gradient_cliping", "gradient_clipping")
    nested = config(tmp_path, optimizer={"type": "AdamW", "params": {"lr": "1.0x"}})
    ran = train(config=nested)
    assert ran.code == 2
    assert 'error: config key optimizer.params.lr must be a number >= 0, not "1.0x"' in ran.err
    refused(train(config=tmp_path / "none.json"), "no file")
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8')
    assert train(config=tmp_path / "ds.json").code == 2


def test_options_that_contradict_the_configuration(
    train: Callable[..., Ran], tmp_path: Path
) -> None:
    written = config(
        tmp_path,
        train_micro_batch_size_per_gpu=4,
        optimizer={"type": "AdamW", "params": {"lr": 1e-3}},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 1}},
    )
    refused(train(config=written, batch_size=2), "train_micro_batch_size_per_gpu is 4, and")
    refused(train(config=written, lr=2e-3), "optimizer.params.lr is 0.001, and forebay train says")
    refused(train(config=written, warmup_steps=3), "scheduler.params.warmup_num_steps is 1, and")
    refused(train(config=written, schedule="cosine"), "--schedule cosine and the configuration's")
    refused(train(config=written, offload="cpu"), "--offload cpu and --config")
    triple = config(
        tmp_path, train_batch_size=10, train_micro_batch_size_per_gpu=4,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    error, _ = train(config=triple).refusal()
    assert all(number in error for number in ("10", "4", "2", "8"))


def test_activations_on_the_host_without_checkpointing(
    train: Callable[..., Ran], tmp_path: Path
) -> None:
    asked = {"cpu_checkpointing": True}
    refused(
        train(config=config(tmp_path, activation_checkpointing=asked)),
        "activation_checkpointing.cpu_checkpointing keeps on the host what checkpointing keeps of",
    )


def test_what_is_not_there_yet_is_named(train: Callable[..., Ran], tmp_path: Path) -> None:
    asked = {"partition_activations": True}
    refused(
        train(config=config(tmp_path, activation_checkpointing=asked)),
        "activation_checkpointing.partition_activations = true is not supported yet",
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.jsonl", None, "no such data file"),
        ("a.csv", "x", 'unknown kind ".csv"'),
        ("a.txt", "", "is empty"),
        ("a.jsonl", "\n\n", "holds no rows"),
        ("a.txt", " \n\t\n\n", "nothing but white space"),
        ("a.jsonl", '{"text": " "}\n{"text": "\\n"}\n', "nothing but white space"),
        ("a.jsonl", '{"text": "a"}\n{"text"', "a.jsonl:2: malformed JSON"),
        ("a.jsonl", '{"text": "a"}\n{"body": "b"}\n', "a.jsonl:2: no schema fits the keys"),
        ("a.jsonl", '{"text": "a"}\n{"text": 3}\n', 'a.jsonl:2: "text" is a number, not text'),
        (
            "a.jsonl",
            '{"text": "a"}\n{"prompt": "", "completion": ""}\n',
            "mixed schemas: a.jsonl:2",
        ),
        ("a.parquet", "x", "a.parquet: not readable as parquet"),
    ],
)
def test_bad_data(
    train: Callable[..., Ran], tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    refused(train(data=tmp_path / name), message)


@pytest.mark.parametrize(
    ("encoding", "hint"), [("utf-16", "iconv -f utf-16 -t"), ("latin1", "iconv -f latin1 -t")]
)
def test_text_in_another_encoding(
    train: Callable[..., Ran], tmp_path: Path, encoding: str, hint: str
) -> None:
    (tmp_path / "a.txt").write_bytes("le café".encode(encoding))
    refused(train(data=tmp_path / "a.txt"), "a.txt:1: not UTF-8 text", hint)


def test_optimizer_settings_need_no_type(train: Callable[..., Ran], tmp_path: Path) -> None:
    """forebay train has one optimizer unless somebody names another."""
    ran = train("--set", "optimizer.params.lr=0.002", "--set", "optimizer.params.eps=1e-7")
    assert ran.code == 0, ran.err
    written = json.loads((tmp_path / "run" / "resolved_config.json").read_text())
    assert written["optimizer"]["type"] == "AdamW"
    assert written["optimizer"]["params"]["lr"] == 0.002


def test_samples_longer_than_the_context(train: Callable[..., Ran], tmp_path: Path) -> None:
    rows = [{"prompt": "a" * size, "completion": "b"} for size in (5, 126, 300)]
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused(
        train(data=path),
        "2 of 3 samples are longer than the sequence length of 128 tokens (the longest has 303)",
        "--truncate cuts their ends off; the model's context is 128 tokens",
    )
    refused(
        train(data=path, sequence_length=16),
        "2 of 3 samples are longer than the sequence length of 16 tokens",
    )


def test_models_that_cannot_be_trained(train: Callable[..., Ran], tmp_path: Path) -> None:
    refused(train(model=tmp_path / "none"), "no model", "local folder")
    refused(train(model="gpt2"), "no model", "hf download NAME")
    (tmp_path / "empty").mkdir()
    refused(train(model=tmp_path / "empty"), "has no config.json")
    (tmp_path / "broken.json").write_text("{")
    refused(train(model=tmp_path / "broken.json"), "is no model configuration")
    refused(
        train(model=model_config(tmp_path / "a", model_type="lama")),
        'unknown architecture "lama"',
    )
    refused(train(model=model_config(tmp_path / "b", model_type="t5")), "no causal language model")
    refused(
        train(model=model_config(tmp_path / "c", hidden_size=33)),
        "is no valid llama configuration",
    )


def test_weights_that_are_missing_are_not_made_up(
    train: Callable[..., Ran], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = model_folder(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refused(
        train(model=folder),
        "1 weights of the llama model are not in",
        "save the whole model again",
    )
    (folder / "model.safetensors").unlink()
    refused(train(model=folder), "cannot load the model in", "to start from scratch")


def test_vocabulary_mismatch(train: Callable[..., Ran], tmp_path: Path) -> None:
    refused(
        train(model=model_config(tmp_path / "a", vocab_size=200)),
        "vocabulary mismatch: the tokenizer has ids up to 258, the model 200 embeddings",
    )
    refused(
        train(model=model_config(tmp_path / "b", vocab_size=32000)),
        "no tokenizer, and its vocabulary of 32000 is not byte-level",
        "--tokenizer",
    )


@pytest.fixture
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "forebay.train.run.load_corpus", lambda *a, **k: pytest.fail("data was read")
    )


@pytest.mark.usefixtures("_no_data")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", 'tensorboard={"enabled": true, "output_path": "/proc"}'), "name /proc/Deep"),
        (("--set", "forebay.profile=gone.json"), "gone.json"),
        (("--resume", "gone"), "gone is no folder"),
    ],
)
def test_what_a_run_reads_and_writes_is_tried_before_data_is_read(
    train: Callable[..., Ran], words: tuple[str, ...], message: str
) -> None:
    refused(train(*words), message)


@pytest.mark.usefixtures("_no_data")
def test_output_folder_is_proved_before_anything_is_loaded(
    train: Callable[..., Ran], tmp_path: Path
) -> None:
    output = tmp_path / "run"
    output.mkdir()
    (output / "thesis.tex").write_text("precious")
    refused(train(), "is not empty (1 entry)", "--overwrite")
    refused(train("--overwrite"), "holds thesis.tex, which no run of forebay wrote")
    assert (output / "thesis.tex").read_text() == "precious"
    refused(train(output=output / "thesis.tex"), "cannot write to the output folder")
    refused(train(output=output / "thesis.tex" / "below"), "cannot write to the output folder")


def test_former_run_stays_until_the_new_one_trains(
    train: Callable[..., Ran], tmp_path: Path
) -> None:
    assert train().code == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    refused(train("--overwrite", data=tmp_path / "none.txt"), "no such data file")
    (tmp_path / "bad.jsonl").write_text("{")
    refused(train("--overwrite", data=tmp_path / "bad.jsonl"), "bad.jsonl:1: malformed JSON")
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}


@pytest.mark.usefixtures("_no_data")
def test_disk_without_room_for_the_model_or_for_its_checkpoints(
    train: Callable[..., Ran], tmp_path: Path
) -> None:
    huge = model_config(tmp_path / "huge", intermediate_size=1 << 40)
    refused(train(model=huge), "the model takes 768.0 TiB on disk, and", "make room")
    refused(
        train(model=huge, save_every=10),
        "the model and a checkpoint of 2.3 PiB take 3.0 PiB on disk, and",
    )


def test_nothing_is_written_by_a_refused_run(train: Callable[..., Ran], tmp_path: Path) -> None:
    train(lr=0)
    train(config=config(tmp_path, gradient_cliping=1.0))
    train(data=tmp_path / "none.txt")
    assert not (tmp_path / "run").exists()


def test_instruction_file_is_good(train: Callable[..., Ran], tmp_path: Path) -> None:
    """The fixture's own data, so that the refusals above are refusals of what they say."""
    assert train(data=instruction_file(tmp_path)).code == 0
