"""What a careless command line must not get away with."""

from __future__ import annotations

import json

import pytest
import torch

import forebay
from forebay.cli.main import main
from forebay.errors import ConfigError, UnsupportedError
from forebay.train.options import ExistingOutput
from forebay.train.save import RunFolder


def test_one_run_at_a_time_claims_a_folder(tmp_path):
    import subprocess
    import sys

    held = RunFolder.prepare(tmp_path / "run", existing=ExistingOutput.REFUSE)
    code = (
        "import sys, pathlib\n"
        "from forebay.train.options import ExistingOutput\n"
        "from forebay.train.save import RunFolder\n"
        "RunFolder.prepare(pathlib.Path(sys.argv[1]), existing=ExistingOutput.OVERWRITE)\n"
    )
    second = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 1
    assert "another run is writing to the output folder" in second.stderr
    assert not list(held.path.iterdir())
    held.release()
    RunFolder.prepare(tmp_path / "run", existing=ExistingOutput.REFUSE)


def test_a_model_file_that_is_a_list(tmp_path, capsys):
    (tmp_path / "list.json").write_text(json.dumps([1, 2]))
    (tmp_path / "text.txt").write_text("some text " * 500)
    words = ["train", "--model", str(tmp_path / "list.json"), "--data", str(tmp_path / "text.txt")]
    assert main([*words, "--output", str(tmp_path / "out")]) == 2
    assert "is no model configuration" in capsys.readouterr().err


def test_a_seed_that_no_generator_takes(tmp_path, capsys):
    words = ["train", "--model", "m", "--data", "d", "--output", str(tmp_path / "out")]
    assert main([*words, "--seed", "99999999999999999999"]) == 2
    assert "--seed must lie in" in capsys.readouterr().err


def test_parameters_of_another_model():
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)
    with pytest.raises(UnsupportedError, match="none of the optimizer's 2 parameters"):
        forebay.offload(model, torch.optim.AdamW(other.parameters()), device="cpu")
    for param in model.parameters():
        param.requires_grad_(False)
    with pytest.raises(UnsupportedError, match="trainable"):
        forebay.offload(model, torch.optim.AdamW(model.parameters()), device="cpu")


def test_arguments_of_offload_that_are_something_else():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UnsupportedError, match=r"not a torch\.nn\.Module"):
        forebay.offload(optimizer, model)
    with pytest.raises(ConfigError, match="positive number"):
        forebay.offload(model, optimizer, device="cpu", clip_norm="1")
    _, offloaded = forebay.offload(model, optimizer, device="cpu")
    with pytest.raises(UnsupportedError, match="offloaded already"):
        forebay.offload(model, offloaded)
    offloaded.close()
