"""Device memory of each step while the sequence length changes from step to step.

Lengths take turns, so that a long sequence comes right after short ones have left memory free:
what forebay staged there must not be in its way.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from forebay.bench.device_memory import at_rest, peaks
from forebay.links.observer import NoObserver
from forebay.tiers.ledger import Role, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.bench.training import Training
    from forebay.plan.program import Lane
    from forebay.tiers.ledger import Ledger

__all__ = ["StagingPeak", "measure_lengths"]


class StagingPeak(NoObserver):
    """The most that was staged on the device since it was last asked.

    Staging only grows when a transfer is put on a lane, which is when this looks.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._most = 0

    def submitted(self, lane: Lane, ticket: Any, nbytes: int) -> None:  # noqa: ARG002
        """Look at the ledger."""
        self._most = max(self._most, self._now())

    def take(self) -> int:
        """Bytes; the next count begins at what is staged now."""
        most = max(self._most, self._now())
        self._most = self._now()
        return most

    def _now(self) -> int:
        return self._ledger.bytes(Tier.DEVICE, Role.STAGING)


def measure_lengths(training: Training) -> Iterator[dict[str, Any]]:
    """One result with an entry for each step, up to the one that ran out of memory if one did."""
    spec, engine = training.spec, training.runner.engine
    rows = spec.micro_batches[0]
    batches = {length: training.batches(rows, length) for length in spec.lengths}
    staging = None
    if engine is not None:
        staging = engine.lanes.observer = StagingPeak(engine.ledger)
    steps: list[dict[str, Any]] = []
    for number in range(spec.steps):
        length = spec.lengths[number % len(spec.lengths)]
        if spec.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = peaks(spec.device)
        begin = time.perf_counter()
        try:
            training.step(batches[length], number)
        except torch.OutOfMemoryError:
            # what led there is the finding; this contestant cannot go on
            yield {**training.about(), "steps": steps, "out_of_memory": number + 1}
            return
        step = {"length": length, "seconds": time.perf_counter() - begin, **peaks(spec.device)}
        for name in ("allocator_retries", "allocator_ooms"):
            if name in step:
                step[name] -= before[name]
        if staging is not None:
            step["staging_peak_bytes"] = staging.take()
        steps.append(step)
    yield {**training.about(), "steps": steps, **at_rest(training)}
