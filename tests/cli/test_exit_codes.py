"""The same kind of mistake has the same exit code, whatever verb meets it; Ctrl-C is one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from cli.train_inputs import forebay, model_config, text_file
from house.tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def _train(folder: Path, *words: object) -> list[object]:
    return [
        "train", "--model", model_config(folder), "--data", text_file(folder),
        "--output", folder / "run", "--steps", 1, "--quiet", *words,
    ]  # fmt: skip


def test_a_path_that_is_no_folder(tmp_path, capsys):
    for words in (
        _train(tmp_path, "--resume", "nowhere"),
        ["inspect", "nowhere"],
        ["export", "nowhere", tmp_path / "out"],
    ):
        ran = forebay(capsys, *words)
        assert (ran.code, ran.refusal()[0]) == (2, "nowhere is no folder"), words


def test_a_folder_without_a_checkpoint(tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    for words in (
        _train(tmp_path, "--resume", empty),
        ["inspect", empty],
        ["export", empty, tmp_path / "out"],
    ):
        ran = forebay(capsys, *words)
        assert (ran.code, ran.refusal()[0]) == (1, f"{empty} has no complete checkpoint"), words


def test_an_output_folder_that_is_not_empty(tmp_path, capsys):
    assert forebay(capsys, *_train(tmp_path, "--save-every", 1)).code == 0
    assert forebay(capsys, *_train(tmp_path)).code == 2
    assert forebay(capsys, "export", tmp_path / "run", tmp_path / "run").code == 2


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_ctrl_c_during_imports(tmp_path, module):
    """A module that is interrupted while it is imported, as a slow one is."""
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src"), *sys.path])
    ran = subprocess.run(
        [sys.executable, "-m", "forebay", "inspect", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (130, "ended: SIGINT\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_the_first_step(tmp_path, capsys, monkeypatch, number, code):
    def interrupted(*args, **kwargs):
        os.kill(os.getpid(), number)
        time.sleep(5)

    monkeypatch.setattr("forebay.train.run.load_corpus", interrupted)
    ran = forebay(capsys, *_train(tmp_path))
    assert ran.code == code
    wanted = f"ended: {number.name} before the first step; nothing was trained\n"
    assert ran.err.endswith(wanted)
    assert "Traceback" not in ran.err
