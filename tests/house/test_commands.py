"""What README and docs tell the reader to type works as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from house.commands import COMMANDS, ContinuousIntegration, Covered, Run
from house.pages import LANGUAGES, blocks, commands, pages
from house.tree import ROOT

_SHOWN = sorted({command.line for command in commands()})
_PYTHON_PAGES = sorted({block.page for block in blocks("python")})


def _environment() -> dict[str, str]:
    """Returns the environment with this interpreter's commands first on PATH."""
    folder = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}


def test_every_fence_names_a_known_language() -> None:
    """A command hidden in a `bash` block would escape the registry."""
    assert not [block[:2] for block in blocks() if block.language not in LANGUAGES]


def test_registry_and_pages_agree() -> None:
    """Every command shown is registered, and nothing is registered that no page shows."""
    assert set(_SHOWN) == set(COMMANDS)


@pytest.mark.parametrize("line", [line for line in _SHOWN if isinstance(COMMANDS.get(line), Run)])
def test_cheap_commands_run(line: str, tmp_path: Path) -> None:
    """Runs the command where a reader would: in an empty folder."""
    how = COMMANDS[line]
    assert isinstance(how, Run)
    for name, text in how.files:
        (tmp_path / name).write_text(text, encoding="utf-8")
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line],
        cwd=tmp_path,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]


@pytest.mark.parametrize(
    "how", [how for how in COMMANDS.values() if isinstance(how, Covered)], ids=lambda how: how.test
)
def test_covering_tests_exist(how: Covered) -> None:
    """The test that stands for a costly command is still there."""
    path, _, function = how.test.partition("::")
    assert re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.MULTILINE)


def test_ci_runs_its_commands() -> None:
    """The make targets that CI stands for are in its script."""
    script = (ROOT / ".ci" / "run").read_text()
    for how in COMMANDS.values():
        if isinstance(how, ContinuousIntegration):
            assert f"make --no-print-directory {how.target}\n" in script


def test_targets_exist() -> None:
    """Each `make TARGET` that a page mentions is one of the Makefile's."""
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for path in pages():
        mentioned = set(re.findall(r"`make ([a-z-]+)", path.read_text())) | {
            line.split()[1] for line in _SHOWN if line.startswith("make ")
        }
        assert not mentioned - set(phony.split()), path


@pytest.mark.parametrize("page", _PYTHON_PAGES)
def test_python_examples_run(page: str, tmp_path: Path) -> None:
    """Runs a page's Python blocks from top to bottom in one new interpreter."""
    code = "\n".join(block.text for block in blocks("python") if block.page == page)
    script = tmp_path / "page.py"
    script.write_text(code, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
