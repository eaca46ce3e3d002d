"""What a benchmark of steps runs: a frozen value that travels to each contestant's process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from forebay.errors import ConfigError
from forebay.model.shape import ModelShape

__all__ = ["MARK", "SHAPES", "WARM_UP", "Shape", "StepSpec", "Task"]

# Begins the line on which a contestant's process says what it found.
MARK = "RESULT "
# The first two steps warm up allocators, kernels and the order of units.
WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama shape; where `frozen`, layers' matrices are not trained.

    Their state would not fit, and forward and backward pass through them all the same.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    tied: bool
    frozen: bool = False

    def planned(self, name: str) -> ModelShape:
        """The same for the planner."""
        return ModelShape(
            name=name,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            ffn=self.feed_forward,
            vocab=self.vocabulary,
            tied=int(self.tied),
        )


def _tied(hidden: int, layers: int, *, heads: int, kv_heads: int, feed_forward: int) -> Shape:
    return Shape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        feed_forward=feed_forward,
        vocabulary=128256 if hidden > 1024 else 16 * hidden,
        tied=True,
    )


def _large(hidden: int, layers: int, *, heads: int, feed_forward: int) -> Shape:
    return Shape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        feed_forward=feed_forward,
        vocabulary=32000,
        tied=False,
    )


SHAPES = {
    "nano": _tied(64, 2, heads=2, kv_heads=2, feed_forward=128),
    "tiny": _tied(256, 4, heads=4, kv_heads=4, feed_forward=1024),
    "1b": _tied(2048, 16, heads=32, kv_heads=8, feed_forward=8192),
    "3b": _tied(3072, 28, heads=24, kv_heads=8, feed_forward=8192),
    "7b": Shape(
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=32,
        feed_forward=11008,
        vocabulary=32000,
        tied=False,
    ),
    "13b": _large(5120, 40, heads=40, feed_forward=13824),
    "18b": _large(6144, 40, heads=48, feed_forward=16384),
    # Wide and shallow, for the cost of moving activations.
    "8k": _large(8192, 8, heads=64, feed_forward=22016),
    "32k": Shape(
        hidden=32768,
        layers=4,
        heads=256,
        kv_heads=256,
        feed_forward=88064,
        vocabulary=4096,
        tied=True,
        frozen=True,
    ),
    # Small units, so that device and host can be filled to within a few gigabytes.
    "19b": _large(4096, 93, heads=32, feed_forward=11008),
    "20b": _large(6144, 44, heads=48, feed_forward=16384),
}


class Task(Enum):
    """What is measured of a contestant at work."""

    STEP = "step"
    """Seconds and bytes of a step, for each micro-batch size in turn."""
    READS = "reads"
    """How long a read of a ready tensor takes while forebay's transfers run."""
    LENGTHS = "lengths"
    """Device memory of each step while the sequence length changes from step to step."""
    STATES = "states"
    """How long state takes off the device and back, and what that frees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """One contestant's work.

    Attributes:
        variant: Who: see `forebay.bench.contestants`.
        task: What is measured.
        size: A name of `SHAPES`.
        micro_batches: Rows of one forward; several are measured one after the other, ascending.
        sequence: Tokens in a row.
        lengths: Tokens in a row, by turns, for `Task.LENGTHS`.
        accumulation: Micro-batches per update.
        steps: Updates, the first two of them warm-up.
        reads: Reads for `Task.READS`.
        clip: Bound on the gradient norm.
        device: "cuda" or "cpu".
        threads: Update threads; None for all cores but one.
        host_budget: Bytes that forebay may place on the host; None for what is available.
        device_budget: Bytes that the process may allocate on the device, which is also forebay's
            own device budget; None for all of it.
        profile: The machine's measured speeds, as JSON text; "" without.
        timeline: File for a trace of three more steps, with a picture beside it; "" for none.
        nvme_path: Folder for the files of `deepspeed3nvme`.
    """

    variant: str
    task: Task = Task.STEP
    size: str = "3b"
    micro_batches: tuple[int, ...] = (8,)
    sequence: int = 2048
    lengths: tuple[int, ...] = (512, 4096)
    accumulation: int = 1
    steps: int = 8
    reads: int = 200
    clip: float = 1.0
    device: str = "cuda"
    threads: int | None = None
    host_budget: int | None = None
    device_budget: int | None = None
    profile: str = ""
    timeline: str = ""
    nvme_path: str = ""

    def __post_init__(self) -> None:
        if self.size not in SHAPES:
            known = ", ".join(SHAPES)
            raise ConfigError(f"size {self.size!r} is not known", hint=f"one of {known}")
        for name in ("micro_batches", "lengths"):
            given = getattr(self, name)
            if not given or min(given) < 1:
                raise ConfigError(f"{name} is {given}; each must be at least 1, and one is needed")
        if list(self.micro_batches) != sorted(set(self.micro_batches)):
            # Staging lives under the largest activations seen, which a smaller batch must not meet.
            raise ConfigError(f"micro_batches is {self.micro_batches}; they must ascend")
        for name in ("sequence", "accumulation", "reads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.steps < 3:
            raise ConfigError(f"steps is {self.steps}; two are warm-up, so it must be at least 3")

    def tokens(self, micro_batch: int) -> int:
        """Tokens per update with this many rows in a forward."""
        return micro_batch * self.sequence * self.accumulation

    @property
    def token_range(self) -> tuple[int, ...]:
        """Fewest and most tokens per update; one number where they are the same."""
        ends = sorted({self.micro_batches[0], self.micro_batches[-1]})
        return tuple(self.tokens(size) for size in ends)

    def as_json(self) -> str:
        """One line."""
        return json.dumps(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """What JSON can say."""
        return asdict(self) | {"task": self.task.value}

    @classmethod
    def from_json(cls, text: str) -> StepSpec:
        """The inverse of `as_json`."""
        data: dict[str, Any] = json.loads(text)
        data["task"] = Task(data["task"])
        for name in ("micro_batches", "lengths"):
            data[name] = tuple(data[name])
        return cls(**data)
