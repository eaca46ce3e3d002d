"""The pages hang together: links lead somewhere, the site lists each page, no page is stale."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import yaml

from house.pages import links, pages
from house.tree import ROOT, files, relative

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DOCS = ROOT / "docs"


@pytest.mark.parametrize("path", pages(), ids=relative)
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link points to a file of the repository."""
    assert not [target for target in links(path) if not (path.parent / target).exists()]


def test_named_tests_exist() -> None:
    """Each `path::function` that a page names is a test of the repository."""
    missing = []
    for path in pages():
        for file, function in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", path.read_text()):
            source = ROOT / file
            if not source.exists() or f"def {function}(" not in source.read_text():
                missing.append(f"{relative(path)}: {file}::{function}")
    assert not missing


def test_every_report_from_the_field_is_answered() -> None:
    """Each kind of fault has a row or shares one, and a row names a test or says why not."""
    numbered = {*range(1, 12), *range(13, 35), *range(38, 44), *range(45, 49), 50, 52, 55}
    numbered |= {*range(58, 64), 66, 70, 72, 76, 77, 78, 81, *range(86, 92), *range(94, 108)}
    numbered |= {109, 110}
    text = (DOCS / "decisions" / "field-reports.md").read_text()
    rows = re.findall(r"^\| ([\d, ]+) \| .* \| (.*) \|$", text, re.MULTILINE)
    assert sorted(int(one) for numbers, _ in rows for one in numbers.split(",")) == sorted(numbered)
    bare = [numbers for numbers, answer in rows if not re.search(r"`tests/|No test", answer)]
    assert not bare


def _listed(nav: list[object]) -> Iterator[str]:
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            for value in entry.values():
                yield from _listed(value if isinstance(value, list) else [value])


def test_site_lists_every_page() -> None:
    """mkdocs.yml names each page of docs once, and no other."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    written = sorted(str(path.relative_to(DOCS)) for path in files(".md", under=DOCS))
    assert sorted(_listed(site["nav"])) == written


def test_site_stays_on_the_machine() -> None:
    """The site loads no font and no script from elsewhere."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert site["theme"]["font"] is False


def test_site_builds(tmp_path: Path) -> None:
    """Builds the site strictly where mkdocs-material is installed (`make docs` installs it)."""
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed")
    # Not --quiet: it would hide the warnings that --strict counts.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    run = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_figures_name_their_command() -> None:
    """A measured speed in README stands near the command that measured it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for match in re.finditer(r"\d[\d,.]* (?:tok/s|tokens/s|GB/s|TFLOP/s)", text):
        near = text[match.start() : match.start() + 1200]
        assert "```console" in near, match.group()
