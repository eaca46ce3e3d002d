"""The random generators of this process: Python's, NumPy's, torch's on the host and each device.

Captured and set together, so that dropout and shuffling go on after a resume as they would have.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from forebay.errors import CheckpointError

__all__ = ["RandomState"]


@dataclass(frozen=True, slots=True)
class RandomState:
    """States of all generators.

    Attributes:
        plain: Python's and NumPy's, as plain values.
        tensors: torch's, by "torch_cpu" and "torch_cuda_0", ...
    """

    plain: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def capture(cls) -> RandomState:
        """The generators as they are now."""
        kind, words, position, has_gauss, gauss = np.random.get_state(legacy=True)
        tensors = {"torch_cpu": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            for index, state in enumerate(torch.cuda.get_rng_state_all()):
                tensors[f"torch_cuda_{index}"] = state
        numpy = [str(kind), [int(w) for w in words], int(position), int(has_gauss), float(gauss)]
        return cls({"python": random.getstate(), "numpy": numpy}, tensors)

    def check(self) -> None:
        """Raise CheckpointError unless `restore` will work, by trying it on new generators."""
        try:
            if "python" in self.plain:
                random.Random().setstate(self.plain["python"])
            if "numpy" in self.plain:
                np.random.RandomState().set_state(_numpy(self.plain["numpy"]))
            if "torch_cpu" in self.tensors:
                torch.Generator().set_state(self.tensors["torch_cpu"])
        except (TypeError, ValueError, RuntimeError, OverflowError, LookupError) as error:
            raise CheckpointError(f"the saved random state is none: {error}") from error

    def restore(self) -> None:
        """Set all generators that were saved and that exist here."""
        if "python" in self.plain:
            random.setstate(self.plain["python"])
        if "numpy" in self.plain:
            np.random.set_state(_numpy(self.plain["numpy"]))
        if "torch_cpu" in self.tensors:
            torch.set_rng_state(self.tensors["torch_cpu"])
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                state = self.tensors.get(f"torch_cuda_{index}")
                if state is not None:
                    torch.cuda.set_rng_state(state, index)


def _numpy(state: Any) -> tuple[str, Any, int, int, float]:
    kind, words, position, has_gauss, gauss = state
    return kind, np.array(words, dtype=np.uint32), position, has_gauss, gauss
