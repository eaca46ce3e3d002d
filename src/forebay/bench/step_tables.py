"""What a step benchmark found, as tables: time beside floor and peers, and device memory."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from forebay.bench.device_memory import allocator_settings, foretold
from forebay.bench.spec import WARM_UP
from forebay.bench.tables import Table, gigabytes

if TYPE_CHECKING:
    from forebay.bench.step import StepBench

__all__ = ["memory_table", "step_table", "traffic_table"]

_DEEPSPEED = "deepspeed"


def step_table(found: StepBench) -> Table:
    """Time: one row for each contestant and size, peers' derived times at the end of a size."""
    spec = found.spec
    rows = []
    for size in spec.micro_batches:
        rows += [_row(found, one, size) for one in found.results if one["micro_batch"] == size]
        rows += _derived_rows(found, size)
    counts = ", ".join(f"{size} x {spec.sequence}" for size in spec.micro_batches)
    tokens = " to ".join(str(count) for count in spec.token_range)
    return Table(
        title=f"One training step, {spec.size}, {tokens} tokens",
        head=(
            "tokens",
            "variant",
            "s/step",
            "low - high",
            "tokens/s",
            "of no offload",
            "floor s",
            "of floor",
            "x DeepSpeed",
            "host RSS GB",
        ),
        rows=tuple(rows),
        notes=(
            f"{spec.size}, {counts} tokens x {spec.accumulation} micro-batches per update, clip "
            f"{spec.clip}; median of {spec.steps - WARM_UP} steps after {WARM_UP}, lowest and "
            "highest beside it.",
            "of no offload and x DeepSpeed compare with the row `none` and with the better of "
            "DeepSpeed's stages, of the same run and the same tokens.",
            *_notes(found),
        ),
    )


def _notes(found: StepBench) -> list[str]:
    rates = found.profile.rates()
    notes = [
        f"Ceilings of this run: link up {rates.link_up / 1e9:.1f}, down "
        f"{rates.link_down / 1e9:.1f}, host memory {rates.host_memory / 1e9:.1f} GB/s (update "
        f"and copies together), update alone {(rates.update or 0) / 1e9:.1f} GB/s.",
    ]
    notes += [
        f"{one['variant']}, {one['tokens']} tokens: {one['verdict']}"
        for one in found.results
        if "verdict" in one
    ]
    return notes + found.unfinished()


def _row(found: StepBench, result: dict[str, Any], size: int) -> tuple[str, ...]:
    seconds = result["seconds"][WARM_UP:]
    middle = statistics.median(seconds)
    floor = found.floor(result["variant"], size)
    return (
        str(result["tokens"]),
        result["variant"],
        f"{middle:.4f}",
        f"{min(seconds):.3f} - {max(seconds):.3f}",
        f"{result['tokens'] / middle:.0f}",
        _ratio(found.median("none", size), middle),
        "" if floor is None else f"{floor:.4f}",
        _ratio(floor, middle),
        _ratio(_better_deepspeed(found, size), middle),
        gigabytes(result["host_peak_bytes"]),
    )


def _ratio(other: float | None, own: float) -> str:
    return "" if other is None else f"{other / own:.2f}"


def _deepspeeds(found: StepBench) -> list[str]:
    return sorted({o["variant"] for o in found.results if o["variant"].startswith(_DEEPSPEED)})


def _better_deepspeed(found: StepBench, size: int) -> float | None:
    """The faster stage's seconds: measured where there is a measurement, else derived."""
    times = [found.median(variant, size) for variant in _deepspeeds(found)]
    measured = [seconds for seconds in times if seconds is not None]
    if measured:
        return min(measured)
    return min(
        (one[0] for v in _deepspeeds(found) if (one := found.derived(v, size))), default=None
    )


def _derived_rows(found: StepBench, size: int) -> list[tuple[str, ...]]:
    """DeepSpeed where it did not run, if no stage of it did; marked so."""
    if any(found.result(variant, size) for variant in _deepspeeds(found)):
        return []
    rows: list[tuple[str, ...]] = []
    better = _better_deepspeed(found, size)
    for variant in _deepspeeds(found):
        derived = found.derived(variant, size)
        if derived is None:
            continue
        seconds, source = derived
        tokens = found.spec.tokens(size)
        rows.append(
            (
                str(tokens),
                f"{variant}: its cost beside compute at {found.spec.tokens(source)} tokens, plus "
                "compute",
                f"{seconds:.4f}",
                "not measured",
                f"{tokens / seconds:.0f}",
                _ratio(found.median("none", size), seconds),
                "",
                "",
                _ratio(better, seconds),
                "",
            )
        )
    return rows


def memory_table(found: StepBench) -> Table:
    """Device memory beside the ledger; see [Note: ledger against peak]."""
    rows = [
        _memory_row(one, found.result("floor", size))
        for size in found.spec.micro_batches
        for one in found.results
        if one["micro_batch"] == size
    ]
    budget = found.spec.device_budget
    return Table(
        title="Device memory",
        head=(
            "tokens",
            "variant",
            "peak GB",
            "reserved GB",
            "at rest GB",
            "ledger at rest GB",
            "at rest beyond ledger %",
            "staged at most GB",
            "peak beyond foretold %",
            "reserved beyond foretold GB",
        ),
        rows=tuple(rows),
        notes=(
            "Foretold is the ledger at rest plus what `floor` takes beside its weights at the same "
            "tokens: activations, gradients and workspaces. Staging is not in it: it has to fit "
            "under them. Percentages are of what was measured.",
            f"Allocator: {allocator_settings()}. Device memory that a process may take: "
            + ("all." if budget is None else f"{budget / 1e9:.1f} GB."),
        ),
    )


def _memory_row(result: dict[str, Any], floor: dict[str, Any] | None) -> tuple[str, ...]:
    peak, reserved = result.get("device_peak_bytes"), result.get("device_reserved_bytes")
    rest, ledger = result.get("device_rest_bytes"), result.get("ledger_rest_bytes")
    own = None if result["variant"] == "floor" else floor
    peak_foretold = foretold(result, own, of="device_peak_bytes")
    reserved_foretold = foretold(result, own, of="device_reserved_bytes")
    staged = None if ledger is None else result["ledger_peak_bytes"] - ledger
    return (
        str(result["tokens"]),
        result["variant"],
        gigabytes(peak),
        gigabytes(reserved),
        gigabytes(rest),
        gigabytes(ledger),
        _beyond(rest, ledger),
        gigabytes(staged),
        _beyond(peak, peak_foretold),
        ""
        if reserved is None or reserved_foretold is None
        else f"{(reserved - reserved_foretold) / 1e9:+.2f}",
    )


def _beyond(measured: int | None, said: int | None) -> str:
    if not measured or said is None:
        return ""
    return f"{100 * (measured - said) / measured:+.1f}"


def traffic_table(found: StepBench) -> Table:
    """What forebay's variants move, and what the planner says of them beside what was measured."""
    ours = [one for one in found.results if "up_bytes" in one]
    return Table(
        title="Traffic, and the planner's forecast",
        head=(
            "tokens",
            "variant",
            "up GB",
            "forecast",
            "up B/param",
            "down GB",
            "forecast",
            "weights in time %",
            "activations down GB",
            "forecast",
            "of full speed at 1 GB/s",
            "device GB",
            "forecast",
            "host GB",
            "forecast",
            "s/step",
            "forecast",
            "set-up s",
        ),
        rows=tuple(_traffic_row(one) for one in ours),
        notes=(
            f"Bytes per update, by the engine's counters after {WARM_UP} warm-up steps; device is "
            "the allocator's peak of reserved bytes, host the process's peak of resident memory.",
            "Of full speed at 1 GB/s: what the step would keep of its speed if activations went "
            "down and came up over such a link without overlap (ZeRO-Infinity's efficiency).",
        ),
    )


def _traffic_row(one: dict[str, Any]) -> tuple[str, ...]:
    seconds = statistics.median(one["seconds"][WARM_UP:])
    in_time, moved = one.get("weights_in_time"), one["activations_bytes"]
    said = one.get("forecast_seconds")
    return (
        str(one["tokens"]),
        one["variant"],
        f"{one['up_bytes'] / 1e9:.2f}",
        _said(one, "up"),
        f"{one['up_bytes'] / one['parameters']:.2f}",
        f"{one['down_bytes'] / 1e9:.2f}",
        _said(one, "down"),
        "" if in_time is None else f"{100 * in_time:.1f}",
        f"{moved / 1e9:.2f}",
        _said(one, "activations"),
        f"{seconds / (seconds + 2 * moved / 1e9):.2f}" if moved else "",
        gigabytes(one.get("device_reserved_bytes")),
        gigabytes(one.get("forecast_device_bytes")),
        gigabytes(one["host_peak_bytes"]),
        gigabytes(one.get("forecast_host_bytes")),
        f"{seconds:.3f}",
        "" if said is None else f"{said:.3f}",
        f"{one.get('setup_seconds', 0):.0f}",
    )


def _said(one: dict[str, Any], what: str) -> str:
    """Gigabytes that the planner says; nothing in results of before it said so."""
    nbytes = one.get(f"forecast_{what}_bytes")
    return "" if nbytes is None else f"{nbytes / 1e9:.2f}"
