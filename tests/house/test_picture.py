"""The committed picture is what its script draws."""

from __future__ import annotations

import runpy

from house.tree import ROOT


def test_step_picture_is_current() -> None:
    """Run `python tools/draw_timeline.py` after a change to the script."""
    tool = runpy.run_path(str(ROOT / "tools" / "draw_timeline.py"), run_name="draw_timeline")
    committed = (ROOT / "docs" / "assets" / "step.svg").read_text(encoding="utf-8")
    assert tool["draw"](tool["exact_step"]()) == committed
