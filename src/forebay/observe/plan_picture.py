"""A comparison as a picture: memory bars by role, step-time bars, a scaling curve."""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from forebay.plan.choose import Candidate
    from forebay.plan.compare import Comparison

__all__ = ["draw_comparison"]

_ROLES: Final = MappingProxyType(
    {
        "lp_params": ("weights", "#4e79a7"),
        "lp_grads": ("gradients", "#f28e2b"),
        "contiguous_grad_buffer": ("gradient sums", "#ffbe7d"),
        "hp_params": ("fp32 masters", "#59a14f"),
        "optim_states": ("optimizer state", "#8cd17d"),
        "activations": ("activations", "#bab0ac"),
        "staging": ("staging", "#d4a6c8"),
    }
)


def draw_comparison(path: Path, comparison: Comparison) -> None:
    """Draw memory of each device and host, step seconds and tokens per second over devices.

    Args:
        path: A .svg or .png file.
        comparison: What to draw.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UnsupportedError(
            "a picture needs matplotlib, which is not installed",
            hint="pip install matplotlib, or leave --picture out: the table says the same",
        ) from error
    every = comparison.choice.all
    figure = figures.Figure(figsize=(13, 2.4 + 0.75 * len(every)), layout="constrained")
    panels = figure.subplots(2, 2)
    _memory(panels[0][0], every, tier="device", limit=comparison.choice.capacity.device)
    _memory(panels[0][1], every, tier="host", limit=comparison.choice.capacity.host)
    panels[0][1].tick_params(labelleft=False)
    _steps(panels[1][0], every)
    _curves(panels[1][1], comparison)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _memory(axes: Any, every: Sequence[Candidate], *, tier: str, limit: int) -> None:
    labels = [one.setup.label for one in every]
    # What is far too large is cut at three times the limit, so that the rest can be told apart.
    most = 3 * limit
    left = [0.0] * len(every)
    for role, (title, color) in _ROLES.items():
        sizes = [getattr(one.tiers, tier).get(role, 0) for one in every]
        shown = [min(size, max(0.0, most - at)) for size, at in zip(sizes, left, strict=True)]
        axes.barh(
            labels,
            [size / 1e9 for size in shown],
            left=[at / 1e9 for at in left],
            color=color,
            label=title,
        )
        left = [at + size for at, size in zip(left, shown, strict=True)]
    for place, one in enumerate(every):
        total = one.tiers.total(tier)
        if total > most:
            words = f"... {total / 1e9:,.0f} GB "
            axes.text(most / 1e9, place, words, va="center", ha="right", fontsize=8, color="white")
    axes.axvline(limit / 1e9, color="#e15759", linewidth=1)
    axes.invert_yaxis()
    axes.set_title(f"GB on each {tier} (red line: usable)", loc="left", fontsize=10)
    axes.tick_params(labelsize=8)


def _steps(axes: Any, every: Sequence[Candidate]) -> None:
    labels = [one.setup.label for one in every]
    for place, one in enumerate(every):
        if one.step is None:
            axes.text(0, place, " does not fit", va="center", fontsize=8, color="#767676")
    passes = [one.step.compute_seconds if one.step else 0.0 for one in every]
    waits = [one.step.seconds - one.step.compute_seconds if one.step else 0.0 for one in every]
    axes.barh(labels, passes, color="#4e79a7", label="computation")
    axes.barh(labels, waits, left=passes, color="#bab0ac", label="waits and updates")
    axes.invert_yaxis()
    axes.set_title("seconds of an update", loc="left", fontsize=10)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=8)


def _curves(axes: Any, comparison: Comparison) -> None:
    for label, points in comparison.curves.items():
        known = [point for point in points if point.tokens_per_second is not None]
        if known:
            axes.plot(
                [point.devices for point in known],
                [point.tokens_per_second for point in known],
                marker="o",
                markersize=3,
                label=label,
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    counts = sorted({point.devices for points in comparison.curves.values() for point in points})
    axes.set_xticks(counts, [f"{count:,}" for count in counts], minor=False)
    for which in ("major", "minor"):
        getattr(axes.yaxis, f"set_{which}_formatter")("{x:,.0f}")
    axes.set_xlabel("devices", fontsize=9)
    axes.set_title("tokens per second", loc="left", fontsize=10)
    axes.tick_params(labelsize=8)
    if axes.get_lines():
        axes.legend(fontsize=7)
