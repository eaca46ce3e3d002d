"""A sheet to draw on, and its file: the same bytes whenever the same is drawn."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from forebay.errors import UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["new_figure", "save_figure"]


def new_figure(*, width: float, height: float, instead: str) -> Any:
    """An empty figure of matplotlib.

    Args:
        width: Inches.
        height: Inches.
        instead: What else shows the same, for the hint where there is no matplotlib.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UnsupportedError(
            "a picture needs matplotlib, which is not installed",
            hint=f"pip install matplotlib, or {instead}",
        ) from error
    return figures.Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure to a .svg or .png file, without the date."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
