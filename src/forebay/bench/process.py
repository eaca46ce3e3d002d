"""Contestants in processes of their own: nothing of one is left when the next begins."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.bench.spec import MARK
from forebay.hardware.profile import Profile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.bench.spec import StepSpec

__all__ = ["Outcome", "ceilings", "run_alone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one process.

    Attributes:
        results: What it had found, in its order.
        failure: Its last words where it did not get to the end, else "".
    """

    results: tuple[dict[str, Any], ...]
    failure: str


def run_alone(spec: StepSpec, *, limit_seconds: float) -> Outcome:
    """Run one contestant; what it finds before the limit, or before it fails, counts."""
    return _worker([spec.as_json()], limit_seconds)


def ceilings(device: str, *, limit_seconds: float) -> Profile:
    """Measure the machine.

    Raises:
        RuntimeError: The ceilings could not be measured.
    """
    found = _worker(["ceilings", device], limit_seconds)
    if not found.results:
        raise RuntimeError(f"the machine could not be measured: {found.failure}")
    return Profile.from_dict(json.loads(found.results[0]["profile"]), source="this run's profile")


def _worker(arguments: Sequence[str], limit: float) -> Outcome:
    command = [sys.executable, "-m", "forebay.bench.worker", *arguments]
    try:
        run = subprocess.run(command, capture_output=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as late:
        return Outcome(results=_results(late.stdout), failure=f"no end within {limit:.0f} s")
    failure = "" if run.returncode == 0 else _last_words(run.returncode, run.stderr)
    return Outcome(results=_results(run.stdout), failure=failure)


def _results(output: bytes | None) -> tuple[dict[str, Any], ...]:
    """Whole lines alone: the last one may have been cut off."""
    lines = (output or b"").decode(errors="replace").split("\n")[:-1]
    return tuple(json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK))


def _last_words(code: int, errors: bytes) -> str:
    words = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    said = next((line for line in reversed(words) if "rror" in line), words[-1] if words else "")
    return f"exit code {code}, {said}"
