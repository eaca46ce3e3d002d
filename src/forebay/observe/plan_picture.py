"""A comparison as a picture: memory bars by role, step-time bars, a scaling curve."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from forebay.observe.figure import new_figure, save_figure
from forebay.plan.words import ROLES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from forebay.plan.choose import Candidate
    from forebay.plan.compare import Comparison, ScalingPoint

__all__ = ["draw_comparison"]

_COLORS: Final = MappingProxyType(
    {
        "lp_params": "#4e79a7",
        "lp_grads": "#f28e2b",
        "contiguous_grad_buffer": "#ffbe7d",
        "hp_params": "#59a14f",
        "optim_states": "#8cd17d",
        "visits": "#f1ce63",
        "activations": "#bab0ac",
        "staging": "#d4a6c8",
    }
)
_GIB: Final = 1 << 30
# Curves this near to each other at every point cannot be told apart.
_SAME: Final = 0.02


def draw_comparison(path: Path, comparison: Comparison) -> None:
    """Draw memory of each device and host, step seconds and tokens per second over devices.

    Args:
        path: A .svg or .png file.
        comparison: What to draw.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    every = comparison.choice.all
    figure = new_figure(
        width=13,
        height=2.4 + 0.75 * len(every),
        instead="leave --picture out: the table says the same",
    )
    figure.suptitle(comparison.title, fontsize=11)
    panels = figure.subplots(2, 2)
    _memory(panels[0][0], every, tier="device", limit=comparison.choice.capacity.device)
    _memory(panels[0][1], every, tier="host", limit=comparison.choice.capacity.host)
    panels[0][1].tick_params(labelleft=False)
    _steps(panels[1][0], every)
    _curves(panels[1][1], comparison)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    save_figure(figure, path)


def _memory(axes: Any, every: Sequence[Candidate], *, tier: str, limit: int) -> None:
    labels = [one.setup.label for one in every]
    usable = limit / _GIB
    # What is far too large is cut at three times the limit, so that the rest can be told apart.
    most = 3 * usable
    left = [0.0] * len(every)
    for role, color in _COLORS.items():
        sizes = [getattr(one.tiers, tier).get(role, 0) / _GIB for one in every]
        shown = [min(size, max(0.0, most - at)) for size, at in zip(sizes, left, strict=True)]
        axes.barh(labels, shown, left=left, color=color, label=ROLES[role])
        left = [at + size for at, size in zip(left, shown, strict=True)]
    for place, one in enumerate(every):
        total = one.tiers.total(tier) / _GIB
        if total > most:
            axes.text(most, place, f"... {total:,.0f} GiB ", va="center", ha="right", fontsize=8)
    axes.set_xlim(0, min(most, 1.05 * max(usable, *left)))
    axes.axvline(usable, color="#e15759", linewidth=1)
    axes.invert_yaxis()
    axes.set_title(f"GiB on each {tier} (red line: usable)", loc="left", fontsize=10)
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
    axes.set_xlim(left=0)
    axes.set_title("seconds of an update", loc="left", fontsize=10)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=8)


def _curves(axes: Any, comparison: Comparison) -> None:
    for points, labels in _alike(comparison):
        axes.plot(
            [point.devices for point in points],
            [point.tokens_per_second for point in points],
            marker="o",
            markersize=3,
            label="\n".join(labels),
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    counts = sorted({point.devices for points in comparison.curves.values() for point in points})
    axes.set_xticks(counts, [f"{count:,}" for count in counts], minor=False)
    for which in ("major", "minor"):
        getattr(axes.yaxis, f"set_{which}_formatter")("{x:,.0f}")
    axes.set_xlabel("devices", fontsize=9)
    axes.set_title("tokens per second, same batch on each device", loc="left", fontsize=10)
    axes.tick_params(which="both", labelsize=8)
    if axes.get_lines():
        axes.legend(fontsize=7)


def _alike(comparison: Comparison) -> list[tuple[list[ScalingPoint], list[str]]]:
    """The curves, with the names of those that would lie on each other as one."""
    found: list[tuple[list[ScalingPoint], list[str]]] = []
    for label, points in comparison.curves.items():
        known = [point for point in points if point.tokens_per_second is not None]
        if not known:
            continue
        for others, labels in found:
            if _is_alike(known, others):
                labels.append(label)
                break
        else:
            found.append((known, [label]))
    return found


def _is_alike(points: Sequence[ScalingPoint], others: Sequence[ScalingPoint]) -> bool:
    return [one.devices for one in points] == [one.devices for one in others] and all(
        abs((one.tokens_per_second or 0.0) / (other.tokens_per_second or 1.0) - 1) <= _SAME
        for one, other in zip(points, others, strict=True)
    )
