"""The two commands on machines that lack something: one clear message, nothing half made."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from house.tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path

_OLD_PYTHON = """#!/bin/sh
# Answers as Python 3.9 would: the version check fails, the version is printed.
case "$1" in
-) exit 1 ;;
-c) echo 3.9.18 ;;
esac
"""


def _setup(venv: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "tools" / "setup"), "deps", str(venv)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _old_python(folder: Path) -> Path:
    path = folder / "python3"
    path.write_text(_OLD_PYTHON)
    path.chmod(0o755)
    return path


def test_named_python_is_too_old(tmp_path: Path) -> None:
    """An interpreter that the user named is refused with both versions."""
    run = _setup(tmp_path / "venv", PYTHON=str(_old_python(tmp_path)))
    assert run.returncode == 1
    assert "needs Python 3.11 or later" in run.stderr
    assert "3.9.18" in run.stderr
    assert not (tmp_path / "venv").exists()


def test_no_python_is_new_enough(tmp_path: Path) -> None:
    """With only an old python3 on PATH the message says how to name another."""
    _old_python(tmp_path)
    for tool in ("bash", "mkdir", "dirname", "env"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    run = _setup(tmp_path / "venv", PYTHON="", PATH=str(tmp_path))
    assert run.returncode == 1
    assert "python3 is 3.9.18" in run.stderr
    assert "hint:" in run.stderr


def test_ci_fails_when_anything_fails() -> None:
    """CI's script stops at the first failure and hides none."""
    script = (ROOT / ".ci" / "run").read_text()
    assert "set -euo pipefail" in script
    assert "|| true" not in script
