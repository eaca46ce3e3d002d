"""The driver of runs that need a GPU: its commands exist, its limits hold. None is needed here."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

import pytest
import typer

from forebay.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
VALUES = {"output": "out", "profile": "profile.json", "budget": "1GiB", "drive": str(ROOT)}


@pytest.fixture(scope="module")
def driver():
    path = ROOT / "benchmarks" / "on_gpu.py"
    found = importlib.util.spec_from_file_location("on_gpu", path)
    module = importlib.util.module_from_spec(found)
    sys.modules["on_gpu"] = module
    found.loader.exec_module(module)
    return module


def test_every_command_is_one_that_exists(driver):
    for run in driver.RUNS:
        words = driver.words_of(run, VALUES)
        if words[1:3] == ["-m", "forebay"]:
            command, words = typer.main.get_command(app), words[3:]
            while hasattr(command, "commands"):
                command, words = command.commands[words[0]], words[1:]
            command.make_context(run.name, list(words))
        else:
            files = [word for word in words if word.startswith(("tests/", "benchmarks/"))]
            assert files, run.command
            assert all((ROOT / file).exists() for file in files), run.command


def test_without_a_gpu_it_says_so_and_lists(driver, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["on_gpu.py"])
    assert driver.main() == 2
    assert "no GPU" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "--list"])
    assert driver.main() == 0
    assert "w1-peers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("needs", "says"),
    [
        ({"gpus": 2}, "needs 2 GPUs"),
        ({"command": "python {drive}"}, "needs --drive"),
        ({"seconds": 100}, "takes about 100 s, of which 50 are left"),
    ],
)
def test_what_cannot_end_is_not_begun(driver, needs, says):
    run = driver.Run(**{"name": "x", "seconds": 1, "command": "python -V", "gpus": 1} | needs)
    assert says in driver.why_not(run, left=50, gpus=1, drive=None)
    assert not driver.why_not(driver.Run("x", 1, "python -V"), left=50, gpus=1, drive=None)


def is_running(process: int) -> bool:
    """Not ended, or ended and not yet taken note of."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_limit_ends_a_run_and_what_it_started(driver, tmp_path):
    child = (
        "import subprocess, sys; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print(child.pid, flush=True); child.wait()"
    )
    log = tmp_path / "log"
    with log.open("wb") as file:
        words = [sys.executable, "-c", child]
        assert driver.carry_out(words, limit=5, log=file)[0] == "stopped after 5 s"
        until = time.monotonic() + 20
        while is_running(int(log.read_text())) and time.monotonic() < until:
            time.sleep(0.05)
        assert not is_running(int(log.read_text()))
        words = [sys.executable, "-c", "print('there'); raise SystemExit(3)"]
        assert driver.carry_out(words, limit=60, log=file)[0] == "failed (exit code 3)"
    assert "there" in log.read_text()
