"""Micro-batches and windows by count: which micro-step ends a window, and what it is worth.

It counts; gradients are the engine's business (`forebay.engine.window`).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from forebay.errors import ConfigError, GradientError
from forebay.plan.placement import AccumulationOrder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.config.resolved import BatchSpec

__all__ = ["MicroBatches"]


class MicroBatches:
    """Counts the micro-steps of the present window.

    Args:
        spec: The configured batch sizes.

    Attributes:
        micro_batch_size: Samples per forward of one process.
        per_update: Micro-batches per update; losses are divided by it.
        world_size: Processes that train together.
        order: In which order micro-batches pass the model.
        done: Micro-steps in the present window.
        boundary: What the caller decided; None counts.
    """

    def __init__(self, spec: BatchSpec) -> None:
        self.micro_batch_size = spec.micro_batch_size
        self.per_update = spec.accumulation_steps
        self.world_size = spec.world_size
        self.order = AccumulationOrder(spec.order)
        self.done = 0
        self.boundary: bool | None = None

    @property
    def is_boundary(self) -> bool:
        """Whether the present micro-step ends the window."""
        if self.boundary is not None:
            return self.boundary
        return self.done + 1 >= self.per_update

    @property
    def train_batch_size(self) -> int:
        """Samples per update over all processes."""
        return self.micro_batch_size * self.per_update * self.world_size

    @property
    def samples(self) -> int:
        """Samples of the present window so far."""
        return self.micro_batch_size * self.done * self.world_size

    @contextlib.contextmanager
    def held_open(self) -> Iterator[None]:
        """Inside, no micro-step ends the window."""
        before, self.boundary = self.boundary, False
        try:
            yield
        finally:
            self.boundary = before

    def accumulation_for(self, train_batch_size: int) -> int:
        """The micro-batches per update that make a batch size; legal between windows.

        Raises:
            ConfigError: No whole number does.
            GradientError: A window is open.
        """
        whole = _positive("train_batch_size", train_batch_size)
        per_pass = self.micro_batch_size * self.world_size
        if whole % per_pass:
            below, above = whole - whole % per_pass, whole - whole % per_pass + per_pass
            raise ConfigError(
                f"train_batch_size {whole} is not a multiple of micro batch "
                f"{self.micro_batch_size} x {self.world_size} process",
                hint=f"{below} and {above} are" if below else f"{above} is",
            )
        self.refuse_open("the batch size")
        return whole // per_pass

    def set_micro_batch_size(self, value: int) -> None:
        """Change the samples per forward; the micro-batches per update stay.

        Raises:
            ConfigError: It is no positive whole number.
            GradientError: A window is open.
        """
        size = _positive("micro_batch_size", value)
        self.refuse_open("the micro-batch size")
        self.micro_batch_size = size

    def refuse_alone(self) -> None:
        """Raise ConfigError where a micro-batch cannot pass the model by itself."""
        if self.order is AccumulationOrder.LAYER and self.per_update > 1:
            raise ConfigError(
                'forebay.accumulation_order is "layer": all of the window\'s '
                f"{self.per_update} micro-batches pass a block together, and one was given",
                hint="call engine.train_batch(iterator), or engine.backward_window(batches) and "
                'engine.step(); or set forebay.accumulation_order: "microbatch"',
            )

    def refuse_open(self, what: str) -> None:
        """Raise GradientError when a window is open."""
        if self.done:
            raise GradientError(
                f"{what} cannot change in the middle of a window "
                f"({self.done} of {self.per_update} micro-batches are done)",
                hint="call flush() or zero_grad() first",
            )


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be a positive whole number")
    return value
