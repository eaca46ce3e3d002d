"""Timelines as a picture, SVG or PNG by the file's name: one panel each, lanes as rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from forebay.observe.figure import new_figure, save_figure
from forebay.plan.timeline import Row

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from forebay.plan.timeline import Timeline

__all__ = ["draw"]

_COLORS: Final = {
    Row.COMPUTE: ("#4e79a7", "#a0cbe8"),
    Row.DEVICE_UPDATE: ("#59a14f", "#8cd17d"),
    Row.DOWN: ("#b07aa1", "#d4a6c8"),
    Row.UP: ("#e15759", "#ff9d9a"),
    Row.HOST_UPDATE: ("#f28e2b", "#ffbe7d"),
    Row.RANKS: ("#9c755f", "#d7b5a6"),
    Row.READ: ("#86bcb6", "#bcd9d5"),
    Row.WRITE: ("#ff9da7", "#ffd2d7"),
    Row.WAIT: ("#767676", "#bab0ac"),
}


def draw(path: Path, timelines: Sequence[Timeline]) -> None:
    """Draw timelines under each other on one scale, each from its own begin.

    Args:
        path: A .svg or .png file.
        timelines: For example a predicted and a recorded one.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    figure = new_figure(
        width=12,
        height=0.6 + 2.2 * len(timelines),
        instead="write a trace (.json) and open it in a browser",
    )
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)
    for (axes,), timeline in zip(panels, timelines, strict=True):
        _panel(axes, timeline.from_zero())
    panels[-1][0].set_xlabel("milliseconds")
    save_figure(figure, path)


def _panel(axes: Any, timeline: Timeline) -> None:
    # Rows that few runs have are shown where they do.
    rare = (Row.RANKS, Row.READ, Row.WRITE)
    rows = [row for row in Row if row not in rare or timeline.in_row(row)]
    for place, row in enumerate(rows):
        # Two shades in turn, so that neighbours can be told apart without an outline.
        for shade in (0, 1):
            axes.broken_barh(
                [(i.begin * 1e3, (i.end - i.begin) * 1e3) for i in timeline.in_row(row)[shade::2]],
                (place - 0.4, 0.8),
                facecolors=_COLORS[row][shade],
            )
    axes.set_yticks(range(len(rows)), [_label(timeline, row) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_title(f"{timeline.title}: {timeline.end * 1e3:.1f} ms", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _label(timeline: Timeline, row: Row) -> str:
    busy = timeline.busy_seconds(row)
    text = f"{row.value}\n{busy * 1e3:.0f} ms"
    nbytes = timeline.nbytes(row)
    return f"{text}, {nbytes / busy / 1e9:.1f} GB/s" if nbytes and busy else text
