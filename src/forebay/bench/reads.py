"""How long a user's `.item()` takes while forebay moves gigabytes: not longer than a piece.

A copy engine serves its queue in order, so a read of one number waits for all that is queued
before it. The numbers read here are ready, on a side stream that has nothing else to do; what a
read takes is then the link's queue alone. Each kind of read is made twice in the same process and
the same rounds: while a step's write-back runs, and after everything has ended. Reads right after
`step()` meet an idle device; reads before each layer of the next forward meet a busy one.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from forebay.bench.device_memory import at_rest, peaks
from forebay.links.observer import NoObserver
from forebay.plan.program import Lane

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.bench.training import Training

__all__ = ["KINDS", "Traffic", "measure_reads"]

# Where a read stands, and whether transfers are under way.
KINDS = (
    ("after step", "busy"),
    ("in forward", "busy"),
    ("after step", "quiet"),
    ("in forward", "quiet"),
)
# Rhythm and order of units are learned in the first steps.
_WARM_UP = 3
# Reads after one step: several steps' write-backs are met, each in all its length.
_READS_PER_STEP = 50
_PAUSE_SECONDS = 0.001
# And before each layer of a forward, which write-back outlasts by part only.
_READS_PER_LAYER = 5
# A model whose write-back ends at once is never met by a read: so many rounds in vain are enough.
_ROUNDS_IN_VAIN = 4


class Traffic(NoObserver):
    """Watches an engine's transfers down; those of a step's end are its write-back."""

    def __init__(self) -> None:
        self._down: list[Any] = []

    def submitted(self, lane: Lane, ticket: Any, nbytes: int) -> None:
        """A ticket to look at."""
        if lane is Lane.DOWN and nbytes:
            self._down = [*(one for one in self._down if not one.done), ticket]

    @property
    def under_way(self) -> bool:
        """Whether something is on its way down."""
        self._down = [one for one in self._down if not one.done]
        return bool(self._down)


@dataclass(slots=True)
class _Reader:
    """Reads of one number, sorted into where and when they were made."""

    device: str
    traffic: Traffic
    seconds: dict[tuple[str, str], list[float]] = field(
        default_factory=lambda: {kind: [] for kind in KINDS}
    )
    ready: torch.Tensor = field(init=False)
    side: Any = None

    def __post_init__(self) -> None:
        self.ready = torch.ones((), device=self.device)
        if self.device == "cuda":
            torch.cuda.synchronize()
            self.side = torch.cuda.Stream()

    def read(self, kind: tuple[str, str]) -> None:
        """One read on the side stream."""
        with contextlib.nullcontext() if self.side is None else torch.cuda.stream(self.side):
            begin = time.perf_counter()
            self.ready.item()
            self.seconds[kind].append(time.perf_counter() - begin)


def measure_reads(training: Training) -> Iterator[dict[str, Any]]:
    """One result: seconds of every read, by kind."""
    spec, engine = training.spec, training.runner.engine
    if engine is None:
        return
    batches = training.batches(spec.micro_batches[0], spec.sequence)
    for number in range(_WARM_UP):
        training.step(batches, number)
    training.await_page_locks()
    traffic = Traffic()
    engine.lanes.observer = traffic
    reader = _Reader(spec.device, traffic)
    layers = _Layers(training.model, reader=reader, traffic=traffic)
    in_vain = dict.fromkeys(KINDS, 0)
    while waiting := [
        kind
        for kind in KINDS
        if len(reader.seconds[kind]) < spec.reads and in_vain[kind] < _ROUNDS_IN_VAIN
    ]:
        for kind in waiting:
            before = len(reader.seconds[kind])
            _round(training, batches, kind=kind, reader=reader, layers=layers)
            in_vain[kind] += len(reader.seconds[kind]) == before
    layers.close()
    yield {
        **training.about(),
        **peaks(spec.device),
        "tokens": spec.tokens(spec.micro_batches[0]),
        "reads": [
            {"place": place, "traffic": when, "seconds": reader.seconds[place, when][: spec.reads]}
            for place, when in KINDS
        ],
        **at_rest(training),
    }


class _Layers:
    """Reads before each layer of the next forward, once a kind is set."""

    def __init__(self, model: Any, *, reader: _Reader, traffic: Traffic) -> None:
        self.kind: tuple[str, str] | None = None
        self._traffic = traffic
        self._reader = reader
        self._handles = [
            layer.register_forward_pre_hook(self._before_layer) for layer in model.model.layers
        ]
        self._handles.append(model.register_forward_hook(self._after_model))

    def _before_layer(self, _module: Any, _arguments: Any) -> None:
        kind = self.kind
        if kind is None:
            return
        for _ in range(_READS_PER_LAYER):
            if kind[1] == "quiet" or self._traffic.under_way:
                self._reader.read(kind)

    def _after_model(self, *_anything: Any) -> None:
        # recomputation in backward calls the layers again
        self.kind = None

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _round(
    training: Training,
    batches: list[torch.Tensor],
    *,
    kind: tuple[str, str],
    reader: _Reader,
    layers: _Layers,
) -> None:
    """Reads of one kind, around or after the end of a step."""
    place, when = kind
    training.step(batches, 0)
    if when == "quiet":
        training.settle()
    if place == "in forward":
        layers.kind = kind
        training.step(batches, 1)
        return
    for _ in range(_READS_PER_STEP):
        if when == "busy" and not reader.traffic.under_way:
            break
        reader.read(kind)
        time.sleep(_PAUSE_SECONDS)
