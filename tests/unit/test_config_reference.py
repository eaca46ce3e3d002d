"""The committed reference page is the table's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.config.reference import main, page
from forebay.config.tables import TABLE
from house.tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def test_page_is_current() -> None:
    """Run `python -m forebay.config.reference` after a change to the tables."""
    committed = ROOT / "docs" / "reference" / "configuration.md"
    assert committed.read_text(encoding="utf-8") == page()


def test_page_has_every_key_once() -> None:
    text = page()
    for key in TABLE:
        heads = text.count(f"| `{key.path}` |") + text.count(f"## `{key.path}`\n")
        assert heads == 1, key.path


def test_rows_have_five_cells() -> None:
    for line in page().splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") == 6


def test_command_writes_the_page(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    main([str(path)])
    assert path.read_text(encoding="utf-8") == page()
