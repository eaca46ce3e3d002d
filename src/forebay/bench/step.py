"""The same training step for forebay and others, in turn, each in a process of its own.

The machine's ceilings are measured first, in the same run, and give the floor of each budget.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.bench.contest import Contest, Findings
from forebay.bench.contestants import resident_share
from forebay.bench.floor import floor_of
from forebay.bench.spec import SHAPES, WARM_UP
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.bench.spec import StepSpec
    from forebay.hardware.profile import Profile

__all__ = ["Entry", "StepBench", "bench_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A contestant and where it takes part.

    Attributes:
        variant: Its name.
        micro_batches: The sizes that it is given; None for all.
    """

    variant: str
    micro_batches: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, text: str) -> Entry:
        """`deepspeed3@8+16` takes part at 8 and 16 rows, `deepspeed3` everywhere.

        Raises:
            ConfigError: What follows the `@` is no list of numbers.
        """
        variant, at, points = text.strip().partition("@")
        if not at:
            return cls(variant=variant)
        try:
            return cls(variant=variant, micro_batches=tuple(int(one) for one in points.split("+")))
        except ValueError as error:
            raise ConfigError(
                f"{text!r} does not say at which micro-batch sizes {variant} takes part",
                hint="as deepspeed3@8+16",
            ) from error

    def within(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Those of a run's sizes at which it takes part.

        Raises:
            ConfigError: It was given a size that the run does not have.
        """
        if self.micro_batches is None:
            return tuple(sizes)
        strange = set(self.micro_batches) - set(sizes)
        if strange:
            raise ConfigError(
                f"{self.variant} is to take part at micro-batch size {min(strange)}, which is none "
                f"of this run's {', '.join(map(str, sizes))}"
            )
        return tuple(size for size in sizes if size in self.micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBench(Findings):
    """What was found: a result for each contestant and micro-batch size."""

    def result(self, variant: str, micro_batch: int) -> dict[str, Any] | None:
        """Of one contestant at one size; None where it did not finish."""
        for one in self.results:
            if one["variant"] == variant and one["micro_batch"] == micro_batch:
                return one
        return None

    def median(self, variant: str, micro_batch: int) -> float | None:
        """Seconds of a step of one contestant; None where it did not finish."""
        found = self.result(variant, micro_batch)
        return None if found is None else statistics.median(found["seconds"][WARM_UP:])

    def floor(self, variant: str, micro_batch: int) -> float | None:
        """The floor of a forebay variant; None without passes, or where no budget is stated."""
        passes = self.result("floor", micro_batch)
        share = resident_share(variant)
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

    def derived(self, variant: str, micro_batch: int) -> tuple[float, int] | None:
        """A time from another size: what this contestant adds to compute there, plus compute here.

        Meant for libraries whose cost beside compute does not depend on the number of tokens.

        Returns:
            Seconds, and the micro-batch size where the cost was measured, the nearest one; None
            where a compute time is missing.
        """
        here = self.median("floor", micro_batch)
        measured = [
            (abs(size - micro_batch), size, seconds - compute)
            for size in self.spec.micro_batches
            if (seconds := self.median(variant, size)) is not None
            and (compute := self.median("floor", size)) is not None
        ]
        if here is None or not measured:
            return None
        _, size, cost = min(measured)
        return here + cost, size

    def as_dict(self) -> dict[str, Any]:
        """All numbers."""
        return {
            **Findings.as_dict(self),
            "floors": [
                {
                    "variant": one["variant"],
                    "micro_batch": one["micro_batch"],
                    "seconds": self.floor(one["variant"], one["micro_batch"]),
                }
                for one in self.results
            ],
        }


def bench_step(
    spec: StepSpec,
    *,
    variants: Sequence[str],
    progress: Callable[[str], None] = lambda _text: None,
    keep: Callable[[StepBench], None] = lambda _found: None,
    limit_seconds: float = 600.0,
    profile: Profile | None = None,
) -> StepBench:
    """Run every contestant.

    Args:
        spec: The work; its variant is replaced.
        variants: Contestants in the order of the run; see `forebay.bench.contestants` and `Entry`.
        progress: Told who runs, and of each result.
        keep: Given what was found so far after each contestant: a run of an hour may be cut off.
        limit_seconds: A contestant that takes longer has not finished.
        profile: The machine's ceilings where they are known; None measures them first.

    Raises:
        ConfigError: A contestant is given a size that the run does not have.
        RuntimeError: The ceilings could not be measured.
    """
    entries = [Entry.parse(text) for text in variants]
    sizes = [entry.within(spec.micro_batches) for entry in entries]
    contest = Contest(spec, profile=profile, progress=progress, limit_seconds=limit_seconds)
    found = StepBench(**contest.found())
    for entry, own_sizes in zip(entries, sizes, strict=True):
        contest.run(
            entry.variant,
            said=_said,
            micro_batches=own_sizes,
            timeline=spec.timeline.replace("{variant}", entry.variant),
        )
        found = StepBench(**contest.found())
        keep(found)
    return found


def _said(result: dict[str, Any]) -> str:
    middle = statistics.median(result["seconds"][WARM_UP:])
    return f"{result['tokens']} tokens: {middle:.4f} s/step"
