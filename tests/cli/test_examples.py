"""The examples run as a reader would run them, learn, and say what they placed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _run(name: str, *arguments: str, folder: Path) -> str:
    """What an example prints, from an empty folder; it must warn of nothing."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(_EXAMPLES / name), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "Warning" not in run.stderr, run.stderr
    return run.stdout


def _losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"  loss (\d+\.\d+)", output)]


def _bytes(output: str) -> dict[str, int]:
    rows = re.findall(r"^(\w+) +(\w+) +([\d,]+) bytes$", output, re.MULTILINE)
    return {f"{tier} {role}": int(count.replace(",", "")) for tier, role, count in rows}


def test_plain_loop(tmp_path: Path) -> None:
    """Half of the default steps are enough to learn the made-up sentences' spelling."""
    output = _run("plain_loop.py", "--steps", "50", "--device", "cpu", folder=tmp_path)
    losses = _losses(output)
    assert len(losses) == 5
    assert losses[-1] < 1.5 < losses[0]
    placed = _bytes(output)
    weights = placed["device lp_params"]
    assert placed["host lp_grads"] == weights
    assert placed["host hp_params"] >= 1.9 * weights
    assert output.splitlines()[-1].startswith("the otter ")


def test_deepspeed_script(tmp_path: Path) -> None:
    """Its own configuration, given as a file as old command lines do."""
    example = importlib.util.spec_from_file_location("script", _EXAMPLES / "deepspeed_script.py")
    module = importlib.util.module_from_spec(example)
    example.loader.exec_module(module)
    (tmp_path / "ds.json").write_text(json.dumps(module.CONFIG))
    arguments = ("--deepspeed", "--deepspeed_config", "ds.json", "--steps", "40")
    output = _run("deepspeed_script.py", *arguments, folder=tmp_path)
    first, last = re.search(r"first tenth (\S+), of the last (\S+)", output).groups()
    assert float(last) < 0.6 * float(first.rstrip(","))
    assert "host contiguous_grad_buffer" in _bytes(output)


def test_train_then_generate(tmp_path: Path) -> None:
    """State leaves while it generates, and training goes on."""
    output = _run(
        "train_then_generate.py", "--rounds", "2", "--steps", "20", folder=tmp_path
    ).splitlines()
    assert len(output) == 2
    for line in output:
        freed = float(re.search(r"freed (\S+) GiB", line).group(1))
        assert freed > 0.0005  # 10 bytes for each of 100,000 parameters
