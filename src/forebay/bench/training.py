"""A contestant at work: the model, its tokens, and one update after the other."""

from __future__ import annotations

import json
import resource
import time
from typing import TYPE_CHECKING, Any

import torch

from forebay.bench.contestants import build_model, contestant
from forebay.bench.device_memory import cap_process
from forebay.bench.spec import SHAPES
from forebay.hardware.profile import Profile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.bench.spec import StepSpec

__all__ = ["Training"]


class Training:
    """Builds what a specification names and trains it.

    Attributes:
        spec: The work.
        model: The model.
        runner: Who trains it.
    """

    def __init__(self, spec: StepSpec) -> None:
        began = time.perf_counter()
        cap_process(spec)
        rates = None
        if spec.profile:
            rates = Profile.from_dict(json.loads(spec.profile), source="this run's profile").rates()
        self.spec = spec
        self.model: Any = build_model(spec)
        self._parameters = sum(param.numel() for param in self.model.parameters())
        self.runner = contestant(spec, self.model, rates=rates)
        self._setup_seconds = time.perf_counter() - began

    def batches(self, micro_batch: int, sequence: int) -> list[torch.Tensor]:
        """Two batches of random tokens, the same for every contestant; int64[rows, tokens]."""
        generator = torch.Generator().manual_seed(1)
        vocabulary, shape = SHAPES[self.spec.size].vocabulary, (micro_batch, sequence)
        return [
            torch.randint(0, vocabulary, shape, generator=generator).to(self.spec.device)
            for _ in range(2)
        ]

    def step(self, batches: Sequence[torch.Tensor], number: int) -> tuple[float, torch.Tensor]:
        """One update; returns its seconds and the last micro-batch's loss.

        Its end is the beginning of the next: nothing is waited for in between. What a step leaves
        undone is done under the next one, which is where its time shows; the loop reads nothing of
        the device, as a training loop that logs every tenth loss would.
        """
        begin = time.perf_counter()
        window = range(number, number + self.spec.accumulation)
        loss = self.runner.backward([batches[index % len(batches)] for index in window])
        self.runner.step()
        if self.runner.engine is None:
            # The others may never wait by themselves: their host would run ahead of the device.
            self.wait()
        return time.perf_counter() - begin, loss

    def wait(self) -> None:
        """Until the device has done what was asked of it."""
        if self.spec.device == "cuda":
            torch.cuda.synchronize()

    def await_page_locks(self) -> None:
        """Until all is locked that will be.

        For the first seconds of a job copies of what is not locked yet go the driver's own way.
        """
        if self.runner.engine is not None:
            self.runner.engine.page_locking.wait()

    def settle(self) -> None:
        """Until transfers and updates have ended too."""
        if self.runner.engine is not None:
            self.runner.engine.synchronize()
        self.wait()

    def about(self) -> dict[str, Any]:
        """What every result says of its process."""
        return {
            "variant": self.spec.variant,
            "size": self.spec.size,
            "parameters": self._parameters,
            "setup_seconds": self._setup_seconds,
            "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def close(self) -> None:
        """Stop threads and give memory back."""
        if self.runner.engine is not None:
            self.runner.engine.close()
