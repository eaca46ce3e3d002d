"""`forebay bench states`: `offload_states` and `reload_states` beside the link's own rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.bench.contest import Contest, Findings
from forebay.bench.spec import Task
from forebay.bench.tables import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.bench.spec import StepSpec
    from forebay.hardware.profile import Profile

__all__ = ["StatesBench", "bench_states"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesBench(Findings):
    """What was found: a result for each contestant and choice of roles."""

    def table(self) -> Table:
        """A row for each cycle."""
        return Table(
            title=f"State off the device and back, {self.spec.size}",
            head=(
                "variant",
                "roles",
                "cycle",
                "moved GiB",
                "freed GiB",
                "away s",
                "GB/s",
                "of link",
                "back s",
                "GB/s",
                "of link",
            ),
            rows=tuple(
                self._row(result, number, cycle)
                for result in self.results
                for number, cycle in enumerate(result["cycles"], 1)
            ),
            notes=(
                "freed: device memory by the driver's own count (on a host without a device, by "
                "the ledger's), while the state is away. Cycle 1 makes the host's buffers, which "
                "are page-locked beside it; later ones use them again.",
                "of link: of the link's measured rate in that direction.",
                *self.unfinished(),
            ),
        )

    def _row(self, result: dict[str, Any], number: int, cycle: dict[str, float]) -> tuple[str, ...]:
        rates, cells = self.profile.rates(), []
        for verb, link in (("offload", rates.link_down), ("reload", rates.link_up)):
            seconds = cycle[f"{verb}_seconds"]
            rate = cycle["moved_bytes"] / seconds
            cells += [f"{seconds:.3f}", f"{rate / 1e9:.1f}", f"{rate / link:.2f}"]
        moved, freed = (f"{cycle[f'{name}_bytes'] / 2**30:.2f}" for name in ("moved", "freed"))
        return (result["variant"], result["choice"], str(number), moved, freed, *cells)


def bench_states(
    spec: StepSpec,
    *,
    variants: Sequence[str],
    progress: Callable[[str], None] = lambda _text: None,
    limit_seconds: float = 600.0,
    profile: Profile | None = None,
) -> StatesBench:
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
        contest.run(variant, task=Task.STATES)
    return StatesBench(**contest.found())
