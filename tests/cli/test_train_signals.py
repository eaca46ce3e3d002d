"""Ctrl-C and SIGTERM: end after the step, save, say so; the second ends at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from cli.train_inputs import metrics, model_config, text_file
from forebay.train.signals import Interrupted, StopSignals

if TYPE_CHECKING:
    from pathlib import Path

# Far more than this machine can do before it is told to stop.
ENDLESS = "1000000"


def start(tmp_path: Path) -> subprocess.Popen[str]:
    words = ["--model", str(model_config(tmp_path)), "--data", str(text_file(tmp_path))]
    words += ["--output", str(tmp_path / "run"), "--steps", ENDLESS, "--sequence-length", "32"]
    return subprocess.Popen(
        [sys.executable, "-m", "forebay", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_a_step(process: subprocess.Popen[str], run: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        path = run / "metrics.jsonl"
        if path.exists() and '"grad_norm"' in path.read_text():
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError(process.communicate()[1])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_after_the_step_and_saves(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    from transformers import AutoModelForCausalLM

    process = start(tmp_path)
    wait_for_a_step(process, tmp_path / "run")
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert out == ""
    assert f"{number.name}: ending after this step; once more to end at once" in err
    assert f"of {ENDLESS} updates, ended by {number.name}" in err
    assert err.rstrip().endswith("to go on from here: the same command with --resume")
    assert f"model saved: {tmp_path / 'run' / 'model'}" in err
    assert "Traceback" not in err
    steps = [line["step"] for line in metrics(tmp_path / "run") if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model") is not None


def test_signal_before_the_first_step_ends_at_once() -> None:
    with pytest.raises(Interrupted) as caught, StopSignals(lambda name: None):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert caught.value.signum == signal.SIGTERM
    assert isinstance(caught.value, KeyboardInterrupt)


def test_first_signal_is_kept_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    heard: list[str] = []
    with StopSignals(heard.append) as stop:
        stop.defer()
        assert not stop.is_requested()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_requested()
        assert heard == ["SIGINT"]
    assert signal.getsignal(signal.SIGINT) is before


def test_second_signal_ends_at_once() -> None:
    code = (
        "import os, signal, time\n"
        "from forebay.train.signals import StopSignals\n"
        "with StopSignals(lambda name: print(name, flush=True)) as stop:\n"
        "    stop.defer()\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert run.stdout == "SIGINT\n"
    assert run.returncode == -signal.SIGINT


def test_other_threads_are_left_alone() -> None:
    import threading

    def inside() -> None:
        with StopSignals(lambda name: None) as stop:
            stop.defer()

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_crash_in_native_code_shows_where_it_was() -> None:
    """The words of `forebay` and `python -m forebay`; what runs instead of a verb crashes."""
    program = (
        "import os, signal, forebay.__main__, forebay.cli.main\n"
        "def save_checkpoint():\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "forebay.cli.main.main = save_checkpoint\n"
        "forebay.__main__.run()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in ran.stderr
    assert "in save_checkpoint" in ran.stderr
