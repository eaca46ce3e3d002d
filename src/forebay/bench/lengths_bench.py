"""`forebay bench lengths`: device memory under a budget while sequence lengths change.

`floor` runs first and without a bound: forward and backward alone say what activations take at
each length. The bound of every other contestant is what is given, or the floor's highest
reservation plus the contestant's own resident state plus 1 GB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.bench.contest import Contest, Findings
from forebay.bench.contestants import STATE_BYTES, resident_share
from forebay.bench.device_memory import allocator_settings
from forebay.bench.spec import Task
from forebay.bench.tables import Table, gigabytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.bench.spec import StepSpec
    from forebay.hardware.profile import Profile

__all__ = ["LengthsBench", "bench_lengths"]

# What staging may take beyond forward and backward alone, and room for the allocator's rounding.
_ABOVE_FLOOR = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsBench(Findings):
    """What was found: a result for each contestant that finished.

    Attributes:
        budgets: The bound of each contestant in bytes; None where there was none.
    """

    budgets: dict[str, int | None]

    def _floor(self) -> dict[str, Any] | None:
        return next((one for one in self.results if one["variant"] == "floor"), None)

    def beyond(self, result: dict[str, Any]) -> list[float | None]:
        """Bytes of each step's peak beyond the largest that steps so far have to have.

        That is the ledger at rest plus what the floor took beside its weights in any step up to
        this one: staging that kept its place under the activations seen adds nothing to it.
        """
        floor = self._floor()
        if floor is None or "device_rest_bytes" not in floor or "ledger_rest_bytes" not in result:
            return [None] * len(result["steps"])
        found: list[float | None] = []
        largest = 0
        for own, least in zip(result["steps"], floor["steps"], strict=False):
            largest = max(largest, least["device_peak_bytes"] - floor["device_rest_bytes"])
            found.append(own["device_peak_bytes"] - result["ledger_rest_bytes"] - largest)
        return found

    def table(self) -> Table:
        """A row for each step, columns for each contestant, and a sentence on each."""
        head = ["step", "length"]
        for one in self.results:
            names = _COLUMNS[: _columns(one)]
            head += [f"{one['variant']} {name}" for name in names]
        beyond = {one["variant"]: self.beyond(one) for one in self.results}
        rows = []
        for number in range(self.spec.steps):
            length = self.spec.lengths[number % len(self.spec.lengths)]
            cells = [str(number + 1), str(length)]
            for one in self.results:
                if number < len(one["steps"]):
                    cells += _cells(one, number, beyond[one["variant"]][number])
                else:
                    cells += ["out of memory", *[""] * (_columns(one) - 1)]
            rows.append(tuple(cells))
        lengths = ", ".join(map(str, self.spec.lengths))
        return Table(
            title=f"Changing lengths, {self.spec.size}",
            head=tuple(head),
            rows=tuple(rows),
            notes=(
                f"{self.spec.size}, {self.spec.micro_batches[0]} rows of {lengths} tokens by "
                f"turns, clip {self.spec.clip}. Peaks are each step's own.",
                "beyond: of the peak, what is more than the ledger at rest and the largest that "
                "`floor` took beside its weights in any step so far; staging adds to it only "
                "where it did not keep under activations seen.",
                *(self._sentence(one) for one in self.results if one["variant"] != "floor"),
                *self.unfinished(),
                f"Allocator: {allocator_settings()}.",
            ),
        )

    def _sentence(self, result: dict[str, Any]) -> str:
        steps, variant = result["steps"], result["variant"]
        if "out_of_memory" in result:
            return f"{variant}: out of memory in step {result['out_of_memory']}."
        if "device_reserved_bytes" not in steps[0]:
            return f"{variant}: memory of this device is not measured."
        budget = self.budgets[variant]
        most = max(step["device_reserved_bytes"] for step in steps)
        retries = sum(step["allocator_retries"] for step in steps)
        ooms = sum(step["allocator_ooms"] for step in steps)
        beyond = max((value for value in self.beyond(result) if value is not None), default=None)
        bound = "no bound" if budget is None else f"a bound of {budget / 1e9:.1f} GB"
        over = "" if beyond is None else f", at most {beyond / 1e9:+.2f} GB beyond"
        return (
            f"{variant}: {most / 1e9:.1f} GB reserved at most under {bound}, {retries} allocator "
            f"retries, {ooms} out of memory{over}."
        )

    def as_dict(self) -> dict[str, Any]:
        """All numbers."""
        return {
            **Findings.as_dict(self),
            "budgets": self.budgets,
            "beyond": {one["variant"]: self.beyond(one) for one in self.results},
        }


_COLUMNS = ("peak GB", "reserved GB", "retries", "staged GB", "beyond GB")


def _columns(result: dict[str, Any]) -> int:
    """How many columns a contestant has: two more where there is a ledger."""
    return len(_COLUMNS) if "ledger_rest_bytes" in result else len(_COLUMNS) - 2


def _cells(result: dict[str, Any], number: int, beyond: float | None) -> list[str]:
    step = result["steps"][number]
    cells = [
        gigabytes(step.get("device_peak_bytes")),
        gigabytes(step.get("device_reserved_bytes")),
        str(step.get("allocator_retries", "")),
    ]
    if "ledger_rest_bytes" in result:
        cells.append(gigabytes(step["staging_peak_bytes"]))
        cells.append("" if beyond is None else f"{beyond / 1e9:+.2f}")
    return cells


def bench_lengths(
    spec: StepSpec,
    *,
    variants: Sequence[str],
    progress: Callable[[str], None] = lambda _text: None,
    limit_seconds: float = 600.0,
    profile: Profile | None = None,
) -> LengthsBench:
    """Run `floor` and every contestant.

    Args:
        spec: The work; its variant and task are replaced.
        variants: Contestants in the order of the run; see `forebay.bench.contestants`.
        progress: Told who runs.
        limit_seconds: A contestant that takes longer has not finished.
        profile: The machine's ceilings; None to measure them first.

    Raises:
        RuntimeError: The ceilings could not be measured.
    """
    contest = Contest(spec, profile=profile, progress=progress, limit_seconds=limit_seconds)
    budgets = {}
    for variant in ["floor", *(one for one in variants if one != "floor")]:
        budgets[variant] = _budget(spec, variant, contest.results)
        contest.run(variant, task=Task.LENGTHS, device_budget=budgets[variant])
    return LengthsBench(**contest.found(), budgets=budgets)


def _budget(spec: StepSpec, variant: str, results: Sequence[dict[str, Any]]) -> int | None:
    """A contestant's bound; without one given, from the floor's result where there is one."""
    if variant == "floor":
        return None
    if spec.device_budget is not None:
        return spec.device_budget
    if not results or "device_reserved_bytes" not in results[0]["steps"][0]:
        return None
    floor = results[0]
    most: int = max(step["device_reserved_bytes"] for step in floor["steps"])
    share = resident_share(variant)
    resident = int((1.0 if share is None else share) * STATE_BYTES * floor["parameters"])
    return most + resident + _ABOVE_FLOOR
