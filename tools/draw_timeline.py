"""Draws docs/assets/step.svg: when units compute, travel and update in one exact step.

The schedule is worked out here from a duration per operation, not drawn by hand: each bar begins
when its lane is free and what it waits for has ended. Durations are chosen to be readable; they
are not a measurement.

    python tools/draw_timeline.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

UNITS = 4
FORWARD, BACKWARD, GRADIENT, UPDATE, WEIGHT = 0.9, 1.6, 0.9, 1.1, 0.7
NORM = 0.7

LANES = ("device", "device to host", "host update", "host to device")
COLOURS = {
    "forward": "#4c78a8",
    "backward": "#9c755f",
    "gradient": "#e39c37",
    "norm": "#b5403a",
    "update": "#54a24b",
    "weight": "#72b7b2",
}
LEFT, TOP, LANE_HEIGHT, BAR_HEIGHT, SCALE = 128, 48, 54, 32, 45.0
OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "assets" / "step.svg"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One operation on one lane."""

    lane: int
    kind: str
    label: str
    start: float
    end: float


class Timeline:
    """Places bars: a lane does one thing at a time, in the order of the calls."""

    def __init__(self) -> None:
        self.bars: list[Bar] = []
        self._free = [0.0] * len(LANES)

    def add(self, lane: int, kind: str, *, label: str, seconds: float, after: float = 0.0) -> float:
        """Places a bar as early as its lane and its predecessor allow; returns its end."""
        start = max(self._free[lane], after)
        self._free[lane] = start + seconds
        bar = Bar(lane=lane, kind=kind, label=label, start=start, end=start + seconds)
        self.bars.append(bar)
        return bar.end


def exact_step() -> list[Bar]:
    """Returns the bars of one step and of the forward that follows it."""
    timeline = Timeline()
    for unit in range(1, UNITS + 1):
        timeline.add(0, "forward", label=f"F{unit}", seconds=FORWARD)
    landed = 0.0
    for unit in range(UNITS, 0, -1):
        end = timeline.add(0, "backward", label=f"B{unit}", seconds=BACKWARD)
        landed = timeline.add(1, "gradient", label=f"g{unit}", seconds=GRADIENT, after=end)
    # Gradients are squared where they live; one scalar decides skip and clip factor for all.
    factor = timeline.add(2, "norm", label="‖g‖", seconds=NORM, after=landed)
    for unit in range(1, UNITS + 1):
        updated = timeline.add(2, "update", label=f"U{unit}", seconds=UPDATE, after=factor)
        arrived = timeline.add(3, "weight", label=f"w{unit}", seconds=WEIGHT, after=updated)
        timeline.add(0, "forward", label=f"F{unit}", seconds=FORWARD, after=arrived)
    return timeline.bars


def _text(x: float, y: float, words: str, *, style: str = "") -> str:
    return f'  <text x="{x:.1f}" y="{y:.1f}"{style}>{words}</text>'


def _bar(bar: Bar) -> list[str]:
    x = LEFT + bar.start * SCALE
    y = TOP + bar.lane * LANE_HEIGHT
    width = (bar.end - bar.start) * SCALE - 2
    middle = ' text-anchor="middle" fill="#fff" font-weight="600"'
    return [
        f'  <rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" rx="3" '
        f'fill="{COLOURS[bar.kind]}"/>',
        _text(x + width / 2, y + BAR_HEIGHT / 2 + 5, bar.label, style=middle),
    ]


def _wait(first: Bar, then: Bar) -> str:
    x1, y1 = LEFT + first.end * SCALE - 2, TOP + first.lane * LANE_HEIGHT
    x2, y2 = LEFT + then.start * SCALE + 2, TOP + then.lane * LANE_HEIGHT + BAR_HEIGHT
    return (
        f'  <path d="M{x1:.1f} {y1} L{x2:.1f} {y2}" stroke="#555" stroke-width="1" '
        'stroke-dasharray="3 3" fill="none"/>'
    )


def draw(bars: list[Bar]) -> str:
    """Returns the picture as SVG text."""
    width = LEFT + max(bar.end for bar in bars) * SCALE + 16
    height = TOP + len(LANES) * LANE_HEIGHT + 52
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" font-family="sans-serif" font-size="13" '
        'role="img" aria-label="Timeline of one exact step">',
        f'  <rect width="{width:.0f}" height="{height}" rx="6" fill="#fff"/>',
    ]
    for lane, name in enumerate(LANES):
        y = TOP + lane * LANE_HEIGHT
        lines.append(
            f'  <rect x="{LEFT}" y="{y}" width="{width - LEFT - 16:.0f}" height="{BAR_HEIGHT}" '
            'fill="#f1f1f1"/>'
        )
        lines.append(_text(12, y + BAR_HEIGHT / 2 + 5, name, style=' fill="#222"'))
    weights = [bar for bar in bars if bar.kind == "weight"]
    second = [bar for bar in bars if bar.kind == "forward"][UNITS:]
    lines += [_wait(weight, forward) for weight, forward in zip(weights, second, strict=True)]
    for bar in bars:
        lines += _bar(bar)
    backward_end = max(bar.end for bar in bars if bar.kind == "backward")
    returns = max(bar.end for bar in bars if bar.kind == "norm")
    for x, words in ((backward_end, "backward() returns"), (returns, "step() returns")):
        at = LEFT + x * SCALE
        anchor = "end" if words.startswith("backward") else "start"
        lines.append(
            f'  <path d="M{at:.1f} {TOP - 12} V{height - 54}" stroke="#b5403a" stroke-width="1"/>'
        )
        style = f' text-anchor="{anchor}" fill="#b5403a"'
        lines.append(_text(at, TOP - 18, words, style=style))
    notes = (
        "F forward, B backward, g gradient leaves, ‖g‖ norm and clip factor, U update on the host, "
        "w new weight arrives.",
        "Units update in the order in which the next forward needs them; a unit's forward waits "
        "(dashed) for that unit alone.",
    )
    for row, note in enumerate(notes):
        y = height - 32 + 18 * row
        lines.append(_text(12, y, note, style=' fill="#222" font-size="12"'))
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(draw(exact_step()), encoding="utf-8")
