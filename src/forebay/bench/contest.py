"""Contestants in turn, each alone, under the machine's ceilings; who does not finish is kept."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from forebay.bench.process import ceilings, run_alone

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.bench.spec import StepSpec
    from forebay.hardware.profile import Profile

__all__ = ["Contest", "Findings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a benchmark found.

    Attributes:
        spec: The work.
        profile: The machine's ceilings.
        results: What contestants found, in the order of the run.
        failures: What the others said last.
    """

    spec: StepSpec
    profile: Profile
    results: tuple[dict[str, Any], ...]
    failures: tuple[tuple[str, str], ...]

    def unfinished(self) -> list[str]:
        """A note for each that did not finish."""
        return [f"{variant} did not finish: {text}" for variant, text in self.failures]

    def as_dict(self) -> dict[str, Any]:
        """All numbers."""
        return {
            "spec": self.spec.as_dict(),
            "profile": asdict(self.profile),
            "results": list(self.results),
            "failures": [list(one) for one in self.failures],
        }


class Contest:
    """One run of a benchmark.

    Args:
        spec: The work; each contestant's own differs from it by its name and little more.
        profile: The machine's ceilings; None to measure them now.
        progress: Told who runs, and who did not finish.
        limit_seconds: A contestant that takes longer has not finished.

    Attributes:
        profile: The machine's ceilings.
        results: What was found, in the order of the run.
        failures: (contestant, what it said last) of those that did not get to their end.

    Raises:
        RuntimeError: The ceilings could not be measured.
    """

    def __init__(
        self,
        spec: StepSpec,
        *,
        profile: Profile | None,
        progress: Callable[[str], None],
        limit_seconds: float,
    ) -> None:
        if profile is None:
            progress("the machine's ceilings")
            profile = ceilings(spec.device, limit_seconds=limit_seconds)
        self.profile = profile
        self.results: list[dict[str, Any]] = []
        self.failures: list[tuple[str, str]] = []
        self._spec = spec
        self._progress = progress
        self._limit_seconds = limit_seconds

    def run(
        self,
        variant: str,
        *,
        empty: str = "",
        said: Callable[[dict[str, Any]], str] | None = None,
        **changes: Any,
    ) -> None:
        """Run one contestant to its end or the limit.

        Args:
            variant: Its name.
            empty: Why one that found nothing has failed; "" where that is no failure.
            said: What to tell of each result.
            changes: What else differs from the benchmark's work.
        """
        self._progress(variant)
        own = replace(self._spec, variant=variant, profile=self.profile.as_json(), **changes)
        outcome = run_alone(own, limit_seconds=self._limit_seconds)
        for result in outcome.results:
            if said is not None:
                self._progress(f"{variant}, {said(result)}")
        self.results += outcome.results
        failure = outcome.failure or ("" if outcome.results else empty)
        if failure:
            self.failures.append((variant, failure))
            self._progress(f"{variant} did not finish: {failure}")

    def found(self) -> dict[str, Any]:
        """The fields of `Findings`."""
        return {
            "spec": self._spec,
            "profile": self.profile,
            "results": tuple(self.results),
            "failures": tuple(self.failures),
        }
