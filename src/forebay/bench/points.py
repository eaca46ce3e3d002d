"""Seconds and bytes of a step, for each micro-batch size that a contestant is given.

One process measures all sizes, since a contestant's start may take a minute: page-locking, and
libraries that compile. Sizes ascend, so that each one's peak is its own.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forebay.bench.device_memory import at_rest, peaks, reset_peaks
from forebay.bench.forecasts import Passes, forecast_of
from forebay.bench.spec import WARM_UP
from forebay.bench.traffic import Counters
from forebay.observe.breakdown import break_down
from forebay.observe.perfetto import write_trace
from forebay.observe.picture import draw
from forebay.observe.recording import record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from forebay.bench.training import Training
    from forebay.engine import Engine

__all__ = ["measure_points"]

# One to reach the rhythm, one to look at, one so that the looked-at one's updates end.
_RECORDED_STEPS = 3


def measure_points(training: Training) -> Iterator[dict[str, Any]]:
    """One result for each size."""
    for micro_batch in training.spec.micro_batches:
        yield _point(training, micro_batch)


def _point(training: Training, micro_batch: int) -> dict[str, Any]:
    spec = training.spec
    training.settle()
    reset_peaks(spec.device)
    batches = training.batches(micro_batch, spec.sequence)
    engine = training.runner.engine
    counters: Counters | None = None
    seconds, losses = [], []
    for number in range(spec.steps):
        if number == WARM_UP and engine is not None:
            training.await_page_locks()
            counters = Counters(engine)
        took, loss = training.step(batches, number)
        seconds.append(took)
        losses.append(loss)
    moved = {} if counters is None else counters.per_update(spec.steps - WARM_UP)
    training.wait()
    result: dict[str, Any] = {
        "micro_batch": micro_batch,
        "tokens": spec.tokens(micro_batch),
        "seconds": seconds,
        "losses": [float(loss) for loss in losses],
        **peaks(spec.device),
        **moved,
        **training.about(),
    }
    if engine is not None:
        result |= forecast_of(
            spec,
            engine.placement,
            passes=Passes(order=engine.order, uses=engine.streaming.residency.uses),
            micro_batch=micro_batch,
            frozen_bytes=_bytes_that_stay(engine, training.model),
        )
    if spec.variant == "floor":
        result |= _passes(training, batches[0])
    elif engine is not None:
        result |= _watch(training, batches)
    return result | at_rest(training)


def _bytes_that_stay(engine: Engine, model: nn.Module) -> int:
    """Of parameters that are neither trained nor come and go."""
    placed = (*engine.units, *engine.frozen)
    known = {id(record.param) for unit in placed for record in unit.records}
    return sum(param.nbytes for param in model.parameters() if id(param) not in known)


def _passes(training: Training, batch: torch.Tensor) -> dict[str, float]:
    """Seconds of one forward and one backward apart: medians of five."""
    model, cuda = training.model, training.spec.device == "cuda"
    forwards, backwards, left = [], [], 0
    for _ in range(5):
        training.wait()
        begin = time.perf_counter()
        loss = model(input_ids=batch, labels=batch).loss
        training.wait()
        middle = time.perf_counter()
        loss.backward()
        training.wait()
        if cuda:
            left = torch.cuda.memory_allocated()
        backwards.append(time.perf_counter() - middle)
        forwards.append(middle - begin)
        model.zero_grad(set_to_none=True)
    found = {"forward_seconds": sorted(forwards)[2], "backward_seconds": sorted(backwards)[2]}
    if left:
        # Weights and gradients stay; what activations had is free, and 1 GB above the peak.
        found["staging_bytes"] = max(0, torch.cuda.max_memory_reserved() + 1e9 - left)
    return found


def _watch(training: Training, batches: list[torch.Tensor]) -> dict[str, Any]:
    """A few more steps under a recorder: where the time goes, and a trace if one is asked for."""
    assert training.runner.engine is not None
    with record(training.runner.engine) as recording:
        for number in range(_RECORDED_STEPS):
            training.step(batches, number)
    part = break_down(recording.records[1], before=recording.records[0])
    if training.spec.timeline:
        tokens = str(training.spec.tokens(len(batches[0])))
        path = Path(training.spec.timeline.replace("{tokens}", tokens))
        write_trace(path, [recording.timeline])
        draw(path.with_suffix(".svg"), [recording.timeline])
    return {"breakdown": part.line("recorded step"), "verdict": part.sentence()}
