"""One contestant, alone in its process: `python -m forebay.bench.worker SPEC`.

Prints one line `RESULT {json}`. With the specification `ceilings DEVICE` it measures the machine
instead, so that no context of the accelerator stays behind in the process that waits.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forebay.bench.contestants import build_model, contestant
from forebay.bench.spec import MARK, SHAPES, StepSpec
from forebay.errors import ForebayError
from forebay.hardware.profile import Profile
from forebay.observe.breakdown import break_down
from forebay.observe.perfetto import write_trace
from forebay.observe.picture import draw
from forebay.observe.recording import record
from forebay.probe.measuring import Effort, measure

if TYPE_CHECKING:
    from forebay.bench.contestants import Contestant

__all__ = ["main", "run_contestant"]

# One to reach the rhythm, one to look at, one so that the looked-at one's updates end.
_RECORDED_STEPS = 3


@dataclass(slots=True)
class _Times:
    """Seconds of each step and, for `floor`, of its passes."""

    steps: list[float] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)


def run_contestant(spec: StepSpec) -> dict[str, Any]:
    """Train and measure; returns what goes into the table."""
    began = time.perf_counter()
    rates = None
    if spec.profile:
        rates = Profile.from_dict(json.loads(spec.profile), source="this run's profile").rates()
    model = build_model(spec)
    parameters = sum(param.numel() for param in model.parameters())
    runner = contestant(spec, model, rates=rates)
    batches = _batches(spec)
    cuda = spec.device == "cuda"
    setup = time.perf_counter() - began
    times = _Times()
    for number in range(spec.steps):
        _step(spec, runner, batches, number, times)
    _wait(spec)
    result: dict[str, Any] = {
        "variant": spec.variant,
        "size": spec.size,
        "tokens": spec.tokens,
        "parameters": parameters,
        "seconds": times.steps,
        "losses": [float(loss) for loss in times.losses],
        "setup_seconds": setup,
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if cuda:
        result["device_peak_bytes"] = torch.cuda.max_memory_allocated()
        result["device_reserved_bytes"] = torch.cuda.max_memory_reserved()
    if spec.variant == "floor":
        result |= _passes(spec, model, batches[0])
    elif runner.engine is not None:
        result |= _watch(spec, runner, batches)
        runner.engine.close()
    return result


def _batches(spec: StepSpec) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    vocabulary, shape = SHAPES[spec.size].vocabulary, (spec.micro_batch, spec.sequence)
    return [
        torch.randint(0, vocabulary, shape, generator=generator).to(spec.device) for _ in range(2)
    ]


def _step(
    spec: StepSpec,
    runner: Contestant,
    batches: list[torch.Tensor],
    number: int,
    times: _Times,
) -> None:
    """One update. Its end is the beginning of the next: nothing is waited for in between.

    What a step leaves undone is done under the next one, which is where its time shows; the loop
    reads nothing of the device, as a training loop that logs every tenth loss would.
    """
    begin = time.perf_counter()
    loss = torch.zeros(())
    for micro in range(spec.accumulation):
        loss = runner.backward(batches[(number + micro) % 2])
    runner.step()
    if runner.engine is None:
        # The others may never wait by themselves: their host would run ahead of the device.
        _wait(spec)
    times.steps.append(time.perf_counter() - begin)
    times.losses.append(loss)


def _wait(spec: StepSpec) -> None:
    if spec.device == "cuda":
        torch.cuda.synchronize()


def _passes(spec: StepSpec, model: Any, batch: torch.Tensor) -> dict[str, float]:
    """Seconds of one forward and one backward apart: medians of five."""
    forwards, backwards, left = [], [], 0
    for _ in range(5):
        _wait(spec)
        begin = time.perf_counter()
        loss = model(input_ids=batch, labels=batch).loss
        _wait(spec)
        middle = time.perf_counter()
        loss.backward()
        _wait(spec)
        if spec.device == "cuda":
            left = torch.cuda.memory_allocated()
        backwards.append(time.perf_counter() - middle)
        forwards.append(middle - begin)
        model.zero_grad(set_to_none=True)
    found = {"forward_seconds": sorted(forwards)[2], "backward_seconds": sorted(backwards)[2]}
    if left:
        # Weights and gradients stay; what activations had is free, and 1 GB above the peak.
        found["staging_bytes"] = max(0, torch.cuda.max_memory_reserved() + 1e9 - left)
    return found


def _watch(spec: StepSpec, runner: Contestant, batches: list[torch.Tensor]) -> dict[str, Any]:
    """A few more steps under a recorder: where the time goes, and a trace if one is asked for."""
    assert runner.engine is not None
    with record(runner.engine) as recording:
        for number in range(_RECORDED_STEPS):
            _step(spec, runner, batches, number, _Times())
    chosen = recording.records[1]
    part = break_down(chosen, before=recording.records[0])
    if spec.timeline:
        path = Path(spec.timeline)
        write_trace(path, [recording.timeline])
        draw(path.with_suffix(".svg"), [recording.timeline])
    return {"breakdown": part.line("recorded step"), "verdict": part.sentence()}


def main(arguments: list[str]) -> int:
    """Run what the arguments say."""
    if arguments[0] == "ceilings":
        # Where the processor computes too, its caches are small and its time is dear.
        small = Effort(elements=8 << 20, link_bytes=64 << 20, repeats=3)
        effort = small if arguments[1] == "cpu" else Effort()
        result: dict[str, Any] = {"profile": measure(arguments[1], effort=effort).as_json()}
    else:
        try:
            result = run_contestant(StepSpec.from_json(arguments[0]))
        except ForebayError as error:
            sys.stderr.write(f"error: {error}\n")
            return 1
    sys.stdout.write(MARK + json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
