"""The same training step for forebay and others, in turn, each in a process of its own.

The machine's ceilings are measured first, in the same run, and give the floor of each budget.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from forebay.bench.floor import floor_of
from forebay.bench.spec import MARK, SHAPES
from forebay.bench.tables import Table
from forebay.hardware.profile import Profile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.bench.spec import StepSpec

__all__ = ["StepBench", "bench_step"]

# The first two steps warm up allocators, kernels and the order of units.
_WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBench:
    """What was found.

    Attributes:
        spec: The work.
        profile: The machine's ceilings.
        results: One for each contestant that finished, in the order of the run.
        failures: What the others said last.
    """

    spec: StepSpec
    profile: Profile
    results: tuple[dict[str, Any], ...]
    failures: tuple[tuple[str, str], ...]

    def median(self, variant: str) -> float | None:
        """Seconds of a step of one contestant; None where it did not finish."""
        found = [one["seconds"] for one in self.results if one["variant"] == variant]
        return statistics.median(found[0][_WARM_UP:]) if found else None

    def floor(self, variant: str) -> float | None:
        """The floor of a forebay variant; None without passes, or where no budget is stated."""
        passes = next((one for one in self.results if one["variant"] == "floor"), None)
        share = _resident_share(variant)
        if passes is None or share is None:
            return None
        return floor_of(
            parameters=passes["parameters"],
            forward=passes["forward_seconds"],
            backward=passes["backward_seconds"],
            rates=self.profile.rates(),
            resident_share=share,
            micro_batches=self.spec.accumulation,
            staging_bytes=passes.get("staging_bytes", math.inf),
            # the last of layers, embedding and head
            tail=passes["forward_seconds"] / (SHAPES[self.spec.size].layers + 2),
        ).seconds

    def table(self) -> Table:
        """One row for each contestant."""
        none = self.median("none")
        rows = [self._row(result, none) for result in self.results]
        rates = self.profile.rates()
        notes = [
            f"{self.spec.size}, {self.spec.micro_batch} x {self.spec.sequence} tokens x "
            f"{self.spec.accumulation} micro-batches per update, clip {self.spec.clip}; median of "
            f"{self.spec.steps - _WARM_UP} steps after {_WARM_UP}, lowest and highest beside it.",
            f"Ceilings of this run: link up {rates.link_up / 1e9:.1f}, down "
            f"{rates.link_down / 1e9:.1f}, host memory {rates.host_memory / 1e9:.1f} GB/s (update "
            f"and copies together), update alone {(rates.update or 0) / 1e9:.1f} GB/s.",
        ]
        notes += [f"{one['variant']}: {one['verdict']}" for one in self.results if "verdict" in one]
        notes += [f"{variant} did not finish: {text}" for variant, text in self.failures]
        return Table(
            title=f"One training step, {self.spec.size}, {self.spec.tokens} tokens",
            head=(
                "variant",
                "s/step",
                "low - high",
                "tokens/s",
                "of no offload",
                "floor s",
                "of floor",
                "device peak GB",
                "reserved GB",
                "host RSS GB",
            ),
            rows=tuple(rows),
            notes=tuple(notes),
        )

    def _row(self, result: dict[str, Any], none: float | None) -> tuple[str, ...]:
        seconds = result["seconds"][_WARM_UP:]
        middle = statistics.median(seconds)
        floor = self.floor(result["variant"])
        return (
            result["variant"],
            f"{middle:.4f}",
            f"{min(seconds):.3f} - {max(seconds):.3f}",
            f"{result['tokens'] / middle:.0f}",
            "" if none is None else f"{none / middle:.2f}",
            "" if floor is None else f"{floor:.4f}",
            "" if floor is None else f"{floor / middle:.2f}",
            _gigabytes(result.get("device_peak_bytes")),
            _gigabytes(result.get("device_reserved_bytes")),
            _gigabytes(result["host_peak_bytes"]),
        )

    def as_dict(self) -> dict[str, Any]:
        """All numbers."""
        return {
            "spec": asdict(self.spec),
            "profile": asdict(self.profile),
            "results": list(self.results),
            "floors": {one["variant"]: self.floor(one["variant"]) for one in self.results},
            "failures": [list(one) for one in self.failures],
        }


def bench_step(
    spec: StepSpec,
    *,
    variants: Sequence[str],
    progress: Callable[[str], None] = lambda _text: None,
    limit_seconds: float = 600.0,
) -> StepBench:
    """Run every contestant.

    Args:
        spec: The work; its variant is replaced.
        variants: Contestants in the order of the run; see `forebay.bench.contestants`.
        progress: Told who runs, and of each result.
        limit_seconds: A contestant that takes longer has not finished.

    Raises:
        RuntimeError: The ceilings could not be measured.
    """
    progress("the machine's ceilings")
    measured, text = _in_process(["ceilings", spec.device], limit_seconds)
    if measured is None:
        raise RuntimeError(f"the machine could not be measured: {text}")
    profile = Profile.from_dict(json.loads(measured["profile"]), source="this run's profile")
    results, failures = [], []
    for variant in variants:
        progress(variant)
        timeline = spec.timeline.replace("{variant}", variant)
        own = replace(spec, variant=variant, profile=measured["profile"], timeline=timeline)
        result, text = _in_process([own.as_json()], limit_seconds)
        if result is None:
            failures.append((variant, text))
            progress(f"{variant} did not finish: {text}")
        else:
            results.append(result)
            progress(f"{variant}: {statistics.median(result['seconds'][_WARM_UP:]):.4f} s/step")
    return StepBench(spec=spec, profile=profile, results=tuple(results), failures=tuple(failures))


def _in_process(arguments: Sequence[str], limit: float) -> tuple[dict[str, Any] | None, str]:
    """A worker's result, or None and its last words."""
    command = [sys.executable, "-m", "forebay.bench.worker", *arguments]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return None, f"no end within {limit:.0f} s"
    for line in run.stdout.splitlines():
        if line.startswith(MARK):
            result: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return result, ""
    words = [line for line in run.stderr.splitlines() if line.strip()]
    said = next((line for line in reversed(words) if "rror" in line), words[-1] if words else "")
    return None, f"exit code {run.returncode}, {said}"


def _resident_share(variant: str) -> float | None:
    if variant == "host" or (variant.startswith("r") and variant[1:].isdigit()):
        return 0.0 if variant == "host" else int(variant[1:]) / 100
    if variant.startswith("mix+"):
        return float(variant.split("+")[1])
    return None


def _gigabytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e9:.1f}"
