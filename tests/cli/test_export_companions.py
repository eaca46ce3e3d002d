"""What `forebay export` puts beside the weights: configuration, generation settings, tokenizer."""

from __future__ import annotations

import json
import os

import pytest

from cli.train_inputs import forebay, model_folder, text_file
from forebay.cli.main import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a model with generation settings of its own; all that is left are checkpoints."""
    import shutil

    folder = tmp_path_factory.mktemp("run")
    source = model_folder(folder / "source")
    settings = {"do_sample": True, "temperature": 0.25, "eos_token_id": 257, "pad_token_id": 258}
    (source / "generation_config.json").write_text(json.dumps(settings))
    words = ["train", "--model", source, "--data", text_file(folder), "--output", folder / "run"]
    words += ["--steps", 2, "--save-every", 1, "--sequence-length", 32, "--quiet"]
    assert main([str(word) for word in words]) == 0
    shutil.rmtree(folder / "run" / "model")
    return folder / "run"


def test_a_run_is_exported_whole(run, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ran = forebay(capsys, "export", run, tmp_path / "out", "--json")
    assert ran.code == 0, ran.err
    written = json.loads(ran.out)
    assert written["has_tokenizer"]
    assert written["has_config"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("abc")["input_ids"][-3:] == [97, 98, 99]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found = model.generation_config
    assert (found.do_sample, found.temperature) == (True, 0.25)
    assert (found.eos_token_id, found.pad_token_id) == (257, 258)
    ids = tokenizer("line 1:", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=2, do_sample=False).shape[1] >= 8


def test_a_tokenizer_may_be_named(run, tmp_path, capsys):
    """Also of a checkpoint that was copied elsewhere, where none is known."""
    import shutil

    copy = shutil.copytree(run / "checkpoints" / "global_step2", tmp_path / "copy")
    ran = forebay(capsys, "export", copy, tmp_path / "bare")
    assert ran.code == 0
    assert "no tokenizer is known: --tokenizer names its folder" in ran.err
    assert not (tmp_path / "bare" / "tokenizer.json").exists()
    ran = forebay(capsys, "export", copy, tmp_path / "out", "--tokenizer", run / "tokenizer")
    assert (ran.code, ran.err) == (0, "")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (run / "tokenizer" / name).read_bytes()


@pytest.mark.parametrize("what", ["nothing", "empty", "pipe", "huge"])
def test_strange_tokenizers_are_refused(run, tmp_path, capsys, what):
    strange = tmp_path / "strange"
    if what != "nothing":
        strange.mkdir()
    if what == "pipe":
        os.mkfifo(strange / "tokenizer.json")
    elif what == "huge":
        with (strange / "tokenizer.json").open("wb") as file:
            file.truncate(1 << 40)
    ran = forebay(capsys, "export", run, tmp_path / "out", "--tokenizer", strange)
    assert ran.code == (2 if what in {"nothing", "empty"} else 1), ran.out
    assert ran.err.startswith("error: ")
    assert "strange" in ran.err.splitlines()[0]
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_links_are_followed_only_where_the_user_says_so(run, tmp_path, capsys):
    """A stranger's run must not put a file of the user's into what is exported."""
    import shutil

    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "tokenizer" / "tokenizer.json").unlink()
    (copy / "tokenizer" / "tokenizer.json").symlink_to(run / "tokenizer" / "tokenizer.json")
    error, _ = forebay(capsys, "export", copy, tmp_path / "out").refusal()
    assert "tokenizer.json is a link" in error
    ran = forebay(capsys, "export", copy, tmp_path / "out", "--tokenizer", copy / "tokenizer")
    assert ran.code == 0, ran.err


def test_other_files_of_the_folder_stay_there(run, tmp_path, capsys):
    """A model's folder may be named; its weights and settings are not the checkpoint's."""
    import shutil

    source = shutil.copytree(run / "tokenizer", tmp_path / "model")
    for name in ("config.json", "model.safetensors", "tokenizer.py", "notes.txt"):
        (source / name).write_text("not this")
    ran = forebay(capsys, "export", run, tmp_path / "out", "--tokenizer", source)
    assert ran.code == 0
    names = {item.name for item in (tmp_path / "out").iterdir()}
    assert not names & {"tokenizer.py", "notes.txt"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
