"""What a step benchmark runs: a frozen value that travels to each contestant's process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from forebay.errors import ConfigError

__all__ = ["MARK", "SHAPES", "Shape", "StepSpec"]

# Begins the line on which a contestant's process says what it found.
MARK = "RESULT "


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama shape."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    tied: bool


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
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """One contestant's work.

    Attributes:
        variant: Who: see `forebay.bench.contestants`.
        size: A name of `SHAPES`.
        micro_batch: Rows of one forward.
        sequence: Tokens in a row.
        accumulation: Micro-batches per update.
        steps: Updates, the first two of them warm-up.
        clip: Bound on the gradient norm.
        device: "cuda" or "cpu".
        threads: Update threads; None for all cores but one.
        host_budget: Bytes that forebay may place on the host; None for what is available.
        profile: The machine's measured speeds, as JSON text; "" without.
        timeline: File for a trace of three more steps, with a picture beside it; "" for none.
    """

    variant: str
    size: str = "3b"
    micro_batch: int = 8
    sequence: int = 2048
    accumulation: int = 1
    steps: int = 8
    clip: float = 1.0
    device: str = "cuda"
    threads: int | None = None
    host_budget: int | None = None
    profile: str = ""
    timeline: str = ""

    def __post_init__(self) -> None:
        if self.size not in SHAPES:
            known = ", ".join(SHAPES)
            raise ConfigError(f"size {self.size!r} is not known", hint=f"one of {known}")
        for name in ("micro_batch", "sequence", "accumulation"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.steps < 3:
            raise ConfigError(f"steps is {self.steps}; two are warm-up, so it must be at least 3")

    @property
    def tokens(self) -> int:
        """Tokens per update."""
        return self.micro_batch * self.sequence * self.accumulation

    def as_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StepSpec:
        """The inverse of `as_json`."""
        data: dict[str, Any] = json.loads(text)
        return cls(**data)
