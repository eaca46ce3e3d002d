"""Training steps with optimizer state in files beside what the drive and the device take alone.

All in one process and in turn: the step with state on the device, the drive reading, writing and
doing both, the step with state in files, then the drive again: a drive that others share changes
while it is measured. The step's floor is the longest of computing, reading and writing.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from forebay import native
from forebay.bench.contestants import build_model
from forebay.bench.process import run_alone
from forebay.bench.spec import SHAPES, StepSpec
from forebay.bench.tables import Table
from forebay.engine import EngineOptions, offload_with
from forebay.engine.file_space import NvmeOptions
from forebay.hardware.storage import storage_of
from forebay.links.host_nvme import FileAccess
from forebay.plan.placement import UpdatePlace, WeightPlace
from forebay.plan.program import Lane
from forebay.probe.drive import Drive
from forebay.tiers.nvme import prove_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from forebay.engine import OffloadedOptimizer

__all__ = ["NvmeStepBench", "NvmeStepSpec", "bench_nvme_step"]

_DRIVE_BYTES = 2 << 30
_WARM_UP = 2
# Moves of each kind before the steps, and as many after them.
_MOVES = 3
# A peer that takes a minute for a step is known after a few.
_MOST_PEER_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeStepSpec:
    """The work.

    Attributes:
        path: A folder on the drive.
        size: A Llama shape of `forebay.bench.spec.SHAPES`.
        micro_batch: Rows of one forward.
        sequence: Tokens in a row.
        steps: Timed updates, after two that warm up.
        device: "cuda" or "cpu".
        host_budget: Host memory that state may stay in; None puts all of it into files.
        buffer_count: Pieces in host memory at once.
        access: How the drive is reached.
        weights: "device", or "nvme" for weights in files beside their state.
        peer_seconds: How long DeepSpeed's offload to files may take in all; 0 leaves it out.
    """

    path: Path
    size: str = "1b"
    micro_batch: int = 8
    sequence: int = 2048
    steps: int = 6
    device: str = "cuda"
    host_budget: int | None = None
    buffer_count: int = 8
    access: FileAccess = field(default_factory=lambda: FileAccess(queue_depth=32))
    weights: str = "device"
    peer_seconds: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeStepBench:
    """What was found; seconds and bytes per second.

    Attributes:
        spec: The work.
        file_system: Of the folder.
        compute: A step with all state on the device.
        read: The drive's rate, reading alone.
        write: The drive's rate, writing alone.
        both: Its rate each way while it does both.
        read_bytes: What a step reads.
        written_bytes: What a step writes.
        steps: Each timed step with state in files.
        peer: Each timed step of DeepSpeed with state in files.
        peer_failure: Why there is none; empty where it was not asked for.
    """

    spec: NvmeStepSpec
    file_system: str
    compute: float
    read: float
    write: float
    both: float
    read_bytes: int
    written_bytes: int
    steps: tuple[float, ...]
    peer: tuple[float, ...] = ()
    peer_failure: str = ""

    @property
    def floor(self) -> float:
        """The longest of computing, reading and writing, each with the drive to itself."""
        return max(self.compute, self.read_bytes / self.read, self.written_bytes / self.write)

    @property
    def mixed_floor(self) -> float:
        """The same where the drive reads and writes at once at `both`."""
        return max(self.compute, max(self.read_bytes, self.written_bytes) / self.both)

    def table(self) -> Table:
        """One row."""
        step = statistics.median(self.steps)
        spec = self.spec
        return Table(
            title="Training steps with optimizer state in files",
            head=(
                "step s",
                "low - high",
                "compute s",
                "read GB",
                "read s",
                "written GB",
                "write s",
                "both at once s",
                "of the longest",
                "of the longest, mixed",
            ),
            rows=(
                (
                    f"{step:.3f}",
                    f"{min(self.steps):.3f} - {max(self.steps):.3f}",
                    f"{self.compute:.3f}",
                    f"{self.read_bytes / 1e9:.2f}",
                    f"{self.read_bytes / self.read:.3f}",
                    f"{self.written_bytes / 1e9:.2f}",
                    f"{self.written_bytes / self.write:.3f}",
                    f"{max(self.read_bytes, self.written_bytes) / self.both:.3f}",
                    f"{step / self.floor:.2f}",
                    f"{step / self.mixed_floor:.2f}",
                ),
            ),
            notes=(
                f"Llama {spec.size}, {spec.micro_batch} x {spec.sequence} tokens, bf16, clipping "
                f"on, weights on {spec.weights}; medians of {len(self.steps)} steps after "
                f"{_WARM_UP}.",
                "Compute: the same step with all state on the device. Read, write: the bytes of "
                "a step at what the drive reaches alone; both at once: at what it reaches each "
                f"way while it does both; medians of {2 * _MOVES} moves, half of them before the "
                f"steps and half after. {self.file_system}.",
                *self._of_peer(),
            ),
        )

    def _of_peer(self) -> tuple[str, ...]:
        if self.peer:
            seconds = statistics.median(self.peer)
            return (
                f"DeepSpeed, stage 3 with its optimizer's state in files, in the same run: "
                f"{seconds:.3f} s ({min(self.peer):.3f} - {max(self.peer):.3f}), "
                f"{seconds / statistics.median(self.steps):.2f} of this.",
            )
        if self.peer_failure:
            return (f"DeepSpeed, stage 3 with its optimizer's state in files: {self.peer_failure}",)
        return ()

    def as_dict(self) -> dict[str, Any]:
        """All numbers."""
        return {
            "device": self.spec.device,
            **{name: value for name, value in asdict(self).items() if name != "spec"},
            "spec": {**asdict(self.spec), "path": str(self.spec.path), "access": "aio"},
            "floor": self.floor,
            "mixed_floor": self.mixed_floor,
        }


def bench_nvme_step(
    spec: NvmeStepSpec, *, progress: Callable[[str], None] = lambda _text: None
) -> NvmeStepBench:
    """Measure.

    Raises:
        StorageError: The folder cannot be used or has no room.
        BudgetError: The model's state does not fit the device; take a smaller one.
    """
    prove_folder(spec.path, nbytes=_DRIVE_BYTES)
    progress("the step with all state on the device")
    plain = EngineOptions(device=spec.device, clip_norm=1.0, update=UpdatePlace.DEVICE)
    compute = statistics.median(list(_seconds(spec, plain, lambda _optimizer: None)))
    progress("the drive: writing, reading, both")
    rates = _drive_rates(spec)
    progress("the step with state in files")
    moved: dict[Lane, int] = {}

    def count(optimizer: OffloadedOptimizer) -> None:
        program = optimizer.engine.current_program()
        moved.update({lane: program.traffic(lane) for lane in (Lane.READ, Lane.WRITE)})

    files = EngineOptions(
        device=spec.device,
        clip_norm=1.0,
        host_budget=spec.host_budget,
        weights=WeightPlace(spec.weights),
        nvme=NvmeOptions(paths=(spec.path,), access=spec.access, buffer_count=spec.buffer_count),
    )
    steps = tuple(_seconds(spec, files, count))
    progress("the drive again")
    read, write, both = (
        statistics.median(before + after)
        for before, after in zip(rates, _drive_rates(spec), strict=True)
    )
    storage = storage_of(spec.path)
    peer, failure = _peer(spec, progress=progress) if spec.peer_seconds else ((), "")
    return NvmeStepBench(
        spec=spec,
        file_system=f"{storage.kind} on {storage.source}",
        compute=compute,
        read=read,
        write=write,
        both=both,
        read_bytes=moved[Lane.READ],
        written_bytes=moved[Lane.WRITE],
        steps=steps,
        peer=peer,
        peer_failure=failure,
    )


def _drive_rates(spec: NvmeStepSpec) -> tuple[list[float], list[float], list[float]]:
    """Bytes per second of each move: reading, writing, and each way while it does both."""
    drive = Drive(spec.path, nbytes=_DRIVE_BYTES, core=native.core())
    try:
        drive.move("write", spec.access, nbytes=_DRIVE_BYTES)  # the file's first blocks
        write, read = (
            [drive.move(kind, spec.access, nbytes=_DRIVE_BYTES).rate for _ in range(_MOVES)]
            for kind in ("write", "read")
        )
        return read, write, [drive.exchange(spec.access) for _ in range(_MOVES)]
    finally:
        drive.close()


def _peer(spec: NvmeStepSpec, *, progress: Callable[[str], None]) -> tuple[tuple[float, ...], str]:
    """DeepSpeed's timed steps, and its last words where there are none."""
    progress("DeepSpeed with state in files")
    with tempfile.TemporaryDirectory(prefix="deepspeed-", dir=spec.path) as inside:
        outcome = run_alone(
            StepSpec(
                variant="deepspeed3nvme",
                size=spec.size,
                micro_batches=(spec.micro_batch,),
                sequence=spec.sequence,
                steps=min(spec.steps, _MOST_PEER_STEPS) + _WARM_UP,
                device=spec.device,
                nvme_path=inside,
            ),
            limit_seconds=spec.peer_seconds,
        )
    found = tuple(float(s) for one in outcome.results for s in one["seconds"][_WARM_UP:])
    return found, "" if found else outcome.failure or "it said nothing"


def _seconds(
    spec: NvmeStepSpec, options: EngineOptions, look: Callable[[OffloadedOptimizer], None]
) -> Iterator[float]:
    """Seconds of each timed step, from one `step()` to the next: the drive works across steps."""
    model = build_model(
        StepSpec(
            variant="planned",
            size=spec.size,
            micro_batches=(spec.micro_batch,),
            sequence=spec.sequence,
            device=spec.device,
        )
    )
    source = torch.optim.AdamW(model.parameters(), lr=1e-5)
    _, optimizer = offload_with(model, source, options=options)
    generator = torch.Generator().manual_seed(0)
    shape = (spec.micro_batch, spec.sequence)
    batch = torch.randint(SHAPES[spec.size].vocabulary, shape, generator=generator)
    batch = batch.to(spec.device)
    found = []
    began = time.perf_counter()
    for number in range(spec.steps + _WARM_UP + 1):
        loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number >= _WARM_UP:
            if spec.device == "cuda":
                torch.cuda.current_stream().synchronize()
            now = time.perf_counter()
            found.append(now - began)
            began = now
    look(optimizer)
    optimizer.close()
    del optimizer, source, model, loss
    gc.collect()
    if spec.device == "cuda":
        torch.cuda.empty_cache()
    yield from found[1:]
