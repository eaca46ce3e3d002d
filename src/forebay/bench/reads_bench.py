"""`forebay bench reads`: the price of a user's `.item()` beside forebay's transfers."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.bench.contest import Contest, Findings
from forebay.bench.spec import Task
from forebay.bench.tables import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.bench.spec import StepSpec
    from forebay.hardware.profile import Profile

__all__ = ["ReadsBench", "bench_reads", "percentile"]

_LIMIT_MS = 1.0


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile: the smallest value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadsBench(Findings):
    """What was found: a result for each contestant."""

    def excess(self, result: dict[str, Any], place: str) -> float | None:
        """Seconds that the 99th percentile is higher with traffic; None without enough reads."""
        by = {one["traffic"]: one["seconds"] for one in result["reads"] if one["place"] == place}
        if min(len(by["busy"]), len(by["quiet"])) < self.spec.reads:
            return None
        return percentile(by["busy"], 0.99) - percentile(by["quiet"], 0.99)

    def table(self) -> Table:
        """Two rows for each contestant and place: with and without traffic."""
        rows = [self._row(result, kind) for result in self.results for kind in result["reads"]]
        return Table(
            title=f"Reading one ready number, {self.spec.size}",
            head=(
                "variant",
                "where",
                "write-back",
                "reads",
                "median ms",
                "p99 ms",
                "highest ms",
                "p99 less p99 without",
                f"at most {_LIMIT_MS:.0f} ms",
            ),
            rows=tuple(rows),
            notes=(
                f"{self.spec.size}, {self.spec.micro_batches[0]} x {self.spec.sequence} tokens; "
                f"`.item()` of a ready tensor on a side stream with nothing else to do, "
                f"{self.spec.reads} of each kind, all kinds in turn in one process, after all that "
                "crosses the link has been page-locked.",
                "after step: right after `step()` returns; in forward: before each layer of the "
                "next forward. busy: while the step's write-back runs; quiet: after everything "
                "has ended. A kind with fewer reads met a write-back too short for more, and no "
                "verdict is given.",
                *self.unfinished(),
            ),
        )

    def _row(self, result: dict[str, Any], kind: dict[str, Any]) -> tuple[str, ...]:
        seconds = kind["seconds"]
        cells = (result["variant"], kind["place"], kind["traffic"], str(len(seconds)))
        if not seconds:
            return (*cells, *[""] * 5)
        excess = self.excess(result, kind["place"]) if kind["traffic"] == "busy" else None
        return (
            *cells,
            f"{1e3 * statistics.median(seconds):.3f}",
            f"{1e3 * percentile(seconds, 0.99):.3f}",
            f"{1e3 * max(seconds):.3f}",
            "" if excess is None else f"{1e3 * excess:+.3f}",
            "" if excess is None else ("yes" if 1e3 * excess <= _LIMIT_MS else "no"),
        )


def bench_reads(
    spec: StepSpec,
    *,
    variants: Sequence[str],
    progress: Callable[[str], None] = lambda _text: None,
    limit_seconds: float = 600.0,
    profile: Profile | None = None,
) -> ReadsBench:
    """Run every contestant.

    Args:
        spec: The work; its variant and task are replaced.
        variants: forebay variants in the order of the run; see `forebay.bench.contestants`.
        progress: Told who runs.
        limit_seconds: A contestant that takes longer has not finished.
        profile: The machine's ceilings; None to measure them first.

    Raises:
        RuntimeError: The ceilings could not be measured.
    """
    contest = Contest(spec, profile=profile, progress=progress, limit_seconds=limit_seconds)
    for variant in variants:
        contest.run(
            variant, task=Task.READS, empty="it moves nothing, so there is nothing to wait for"
        )
    return ReadsBench(**contest.found())
