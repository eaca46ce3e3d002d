"""Saving checkpoints at once and beside training, beside what the disk itself takes.

Each round, in turn: the disk's own write, a save at once, and training steps during a save beside
them. So a neighbour that takes disk or cores slows all three.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from forebay.bench.disk import DiskProbe
from forebay.bench.tables import Table
from forebay.checkpoint.disk import RealDisk
from forebay.engine import EngineOptions, offload_with
from forebay.engine.save_request import Latest, SaveRequest, SaveTiming
from forebay.engine.saving import CheckpointSaver
from forebay.engine.snapshot import RunState
from forebay.errors import ConfigError
from forebay.plan.placement import UpdatePlace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.engine import Engine

__all__ = ["CheckpointBench", "CheckpointSpec", "SaveRound", "bench_checkpoint"]

_WIDTH: Final = 2048
_LAYER: Final = _WIDTH * _WIDTH
_PLACES: Final = {"cpu": UpdatePlace.HOST, "none": UpdatePlace.DEVICE}
_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """What is saved.

    Attributes:
        millions: Parameters, in layers of 4 million; 12 bytes of each are saved.
        rows: Of 2048 numbers in a training step's input: how long its passes take.
        rounds: After one that warms up.
        device: "cpu" or "cuda".
        offload: Where the state lives: a name of DeepSpeed's, "cpu" or "none".
        precision: Of the working weights: bf16, fp16 or fp32.
    """

    millions: int = 64
    rows: int = 256
    rounds: int = 5
    device: str = "cpu"
    offload: str = "cpu"
    precision: str = "bf16"

    def __post_init__(self) -> None:
        for name, known in (("offload", _PLACES), ("precision", _DTYPES)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}", hint=f"one of {', '.join(known)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRound:
    """One round, in seconds.

    Attributes:
        nbytes: Of the checkpoint's tensors.
        disk: The disk's own write of as many bytes.
        at_once: A save that returns when it is complete.
        beside: A save beside training, to its end.
        stall: How long training stood still for that one.
        step: A training step without a save.
        steps_beside: Each training step that began during the save.
    """

    nbytes: int
    disk: float
    at_once: float
    beside: float
    stall: float
    step: float
    steps_beside: tuple[float, ...]

    @property
    def slowdown(self) -> float:
        """How much longer the steps beside a save took, all together."""
        return sum(self.steps_beside) - len(self.steps_beside) * self.step


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointBench:
    """All rounds of some specifications.

    Attributes:
        results: (specification, its rounds).
        is_direct: Whether the disk was written directly.
        file_system: Of the folder, as the system names it.
    """

    results: tuple[tuple[CheckpointSpec, tuple[SaveRound, ...]], ...]
    is_direct: bool
    file_system: str

    def table(self) -> Table:
        """One row for each specification: medians over rounds, ratios within a round."""
        rows = [_row(spec, rounds) for spec, rounds in self.results]
        rounds = len(self.results[0][1])
        how = "direct writes (O_DIRECT)" if self.is_direct else "writes through the page cache"
        return Table(
            title="Checkpoints beside the disk",
            head=(
                "weights, offload",
                "GB",
                "disk GB/s",
                "save GB/s",
                "of disk",
                "low - high",
                "beside s",
                "stall s",
                "of a save at once",
                "steps longer s",
                "step s",
            ),
            rows=tuple(rows),
            notes=(
                f"Medians of {rounds} rounds after one that warms up; ratios are taken within a "
                "round.",
                f"The disk: {how} of 16 MiB from memory by four threads into a file that was laid "
                f"out first, then fsync; {self.file_system}.",
                "Stall: what the training thread waited for a save beside training. Steps longer: "
                "how much longer all steps beside it took, with what copying and writing took "
                "of cores and memory.",
            ),
        )

    def as_dict(self) -> dict[str, Any]:
        """All numbers."""
        return {
            "device": self.results[0][0].device,
            "is_direct": self.is_direct,
            "file_system": self.file_system,
            "results": [
                {"spec": asdict(spec), "rounds": [asdict(one) for one in rounds]}
                for spec, rounds in self.results
            ],
        }


def _row(spec: CheckpointSpec, rounds: tuple[SaveRound, ...]) -> tuple[str, ...]:
    def middle(value: Callable[[SaveRound], float]) -> float:
        return statistics.median(value(one) for one in rounds)

    ratios = [one.disk / one.at_once for one in rounds]
    return (
        f"{spec.precision}, {spec.offload}",
        f"{rounds[0].nbytes / 1e9:.2f}",
        f"{middle(lambda one: one.nbytes / one.disk) / 1e9:.2f}",
        f"{middle(lambda one: one.nbytes / one.at_once) / 1e9:.2f}",
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f} - {max(ratios):.2f}",
        f"{middle(lambda one: one.beside):.3f}",
        f"{middle(lambda one: one.stall):.4f}",
        f"{100 * middle(lambda one: one.stall / one.at_once):.1f}%",
        f"{middle(lambda one: one.slowdown):.3f}",
        f"{middle(lambda one: one.step):.3f}",
    )


class _Training:
    """A model of equal layers that trains on one batch."""

    def __init__(self, spec: CheckpointSpec) -> None:
        torch.manual_seed(0)
        dtype = _DTYPES[spec.precision]
        layers = [nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(max(1, spec.millions // 4))]
        model = nn.Sequential(*layers).to(dtype)
        source = torch.optim.AdamW(model.parameters(), lr=1e-4)
        options = EngineOptions(device=spec.device, update=_PLACES[spec.offload], clip_norm=1.0)
        self._model, self.optimizer = offload_with(model, source, options=options)
        # Noise, so that moments are no pattern that a drive makes smaller.
        self._rows = torch.randn(spec.rows, _WIDTH).to(dtype).to(spec.device)

    @property
    def engine(self) -> Engine:
        """What is saved."""
        return self.optimizer.engine

    def step(self) -> float:
        """Seconds of one update, begun as the one before left it."""
        began = time.monotonic()
        self._model(self._rows).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.monotonic() - began


def bench_checkpoint(
    spec: CheckpointSpec,
    *,
    folder: Path,
    variants: Sequence[tuple[str, str]],
    progress: Callable[[str], None] = lambda _text: None,
) -> CheckpointBench:
    """Measure every variant.

    Args:
        spec: The work; its precision and offload are replaced.
        folder: On the disk to measure; what is written there is removed again.
        variants: (precision, offload) in the order of the run.
        progress: Told of each.

    Raises:
        CheckpointError: The disk has no room, or fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    probe = DiskProbe(folder)
    results = []
    for precision, offload in variants:
        own = replace(spec, precision=precision, offload=offload)
        progress(f"{precision}, {offload}")
        results.append((own, tuple(_rounds(own, folder / "checkpoints", probe))))
    return CheckpointBench(
        results=tuple(results), is_direct=probe.is_direct, file_system=_file_system(folder)
    )


def _rounds(spec: CheckpointSpec, folder: Path, probe: DiskProbe) -> list[SaveRound]:
    training = _Training(spec)
    saver = CheckpointSaver(training.engine)
    try:
        for _ in range(2):
            training.step()
        return [_round(training, saver, folder, probe) for _ in range(spec.rounds + 1)][1:]
    finally:
        saver.wait()
        training.optimizer.close()
        RealDisk().remove_tree(folder)


def _round(
    training: _Training, saver: CheckpointSaver, folder: Path, probe: DiskProbe
) -> SaveRound:
    steps = [training.step() for _ in range(3)]
    training.engine.quiesce("bench")  # a step's own end is no part of the save
    _start(saver, folder, SaveTiming.AT_ONCE)
    at_once = _end(saver, folder)
    disk = probe.seconds(at_once[0])
    os.sync()
    _start(saver, folder, SaveTiming.BESIDE_TRAINING)
    beside = []
    while saver.is_writing:
        beside.append(training.step())
    found = _end(saver, folder)
    return SaveRound(
        nbytes=at_once[0],
        disk=disk,
        at_once=at_once[1],
        beside=found[1],
        stall=found[2],
        step=statistics.median(steps),
        steps_beside=tuple(beside),
    )


_RUN: Final = RunState(counters={}, config={}, client_state={})


def _start(saver: CheckpointSaver, folder: Path, timing: SaveTiming) -> None:
    request = SaveRequest(folder=folder, tag="bench", latest=Latest.LEAVE, timing=timing)
    saver.save(request, _RUN)


def _end(saver: CheckpointSaver, folder: Path) -> tuple[int, float, float]:
    """Bytes, seconds and stall; the checkpoint is gone, and the disk has nothing left to do."""
    saver.wait()
    last = saver.last
    assert last is not None
    RealDisk().remove_tree(folder / "bench")
    os.sync()
    return last.nbytes, last.seconds, last.stall_seconds


def _file_system(folder: Path) -> str:
    """Type and device of the mount that a folder is in."""
    best, found = "", "an unknown file system"
    path = str(folder.resolve())
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        device, point, kind, *_ = line.split()
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, found = point, f"{kind} on {device}"
    return found
