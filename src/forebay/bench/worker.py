"""One contestant, alone in its process: `python -m forebay.bench.worker SPEC`.

Prints a line `RESULT {json}` for each thing that it found, as soon as it has. With the
specification `ceilings DEVICE` it measures the machine instead, so that no context of the
accelerator stays behind in the process that waits.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from forebay.bench.lengths import measure_lengths
from forebay.bench.points import measure_points
from forebay.bench.reads import measure_reads
from forebay.bench.spec import MARK, StepSpec, Task
from forebay.bench.states import measure_states
from forebay.bench.training import Training
from forebay.errors import ForebayError
from forebay.probe.measuring import Effort, measure

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["main", "run_contestant"]

_TASKS = {
    Task.STEP: measure_points,
    Task.READS: measure_reads,
    Task.LENGTHS: measure_lengths,
    Task.STATES: measure_states,
}


def run_contestant(spec: StepSpec) -> Iterator[dict[str, Any]]:
    """Train and measure; yields what goes into the table."""
    training = Training(spec)
    yield from _TASKS[spec.task](training)
    training.close()


def main(arguments: list[str]) -> int:
    """Run what the arguments say."""
    if arguments[0] == "ceilings":
        # Where the processor computes too, its caches are small and its time is dear.
        small = Effort(elements=8 << 20, link_bytes=64 << 20, repeats=3)
        effort = small if arguments[1] == "cpu" else None
        _say({"profile": measure(arguments[1], effort=effort).as_json()})
        return 0
    try:
        for result in run_contestant(StepSpec.from_json(arguments[0])):
            _say(result)
    except ForebayError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _say(result: dict[str, Any]) -> None:
    sys.stdout.write(f"{MARK}{json.dumps(result)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
