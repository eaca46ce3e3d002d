"""What is generated and committed is what its script makes today."""

from __future__ import annotations

import runpy
from typing import Any

from house.tree import ROOT


def _tool(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / f"{name}.py"), run_name=name)


def test_step_picture_is_current() -> None:
    """Run `python tools/draw_timeline.py` after a change to the script."""
    tool = _tool("draw_timeline")
    committed = (ROOT / "docs" / "assets" / "step.svg").read_text(encoding="utf-8")
    assert tool["draw"](tool["exact_step"]()) == committed


def test_command_line_page_is_current() -> None:
    """Run `python tools/cli_reference.py` after a change to a verb."""
    from forebay.cli.main import app

    tool = _tool("cli_reference")
    committed = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert tool["reference"](app) == committed


def test_page_of_machines_is_current() -> None:
    """Run `python tools/plan_machines.py` after a change to the catalogue."""
    tool = _tool("plan_machines")
    committed = (ROOT / "docs" / "plan-machines.md").read_text(encoding="utf-8")
    assert tool["page"]() == committed


def test_page_of_published_figures_is_current() -> None:
    """Run `python tools/plan_claims.py` after a change to the planner's model."""
    tool = _tool("plan_claims")
    committed = (ROOT / "docs" / "plan-claims.md").read_text(encoding="utf-8")
    assert tool["page"]() == committed
