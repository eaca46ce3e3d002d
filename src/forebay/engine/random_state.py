"""The random generators of this process: Python's, NumPy's, torch's on the host and each device.

Captured and set together, so that dropout and shuffling go on after a resume as they would have.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from forebay.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RandomState"]

# Of one machine.
_MOST_DEVICES: Final = 64


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
    def capture(cls, device: torch.device | None = None, *, ranks: int = 1) -> RandomState:
        """The generators as they are now.

        Args:
            device: Where the model computes.
            ranks: Where several share a machine, only `device`'s generator belongs to this one;
                it is then "torch_cuda_0" on each of them, wherever it may go on.
        """
        kind, words, position, has_gauss, gauss = np.random.get_state(legacy=True)
        tensors = {"torch_cpu": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            if ranks == 1:
                for index, state in enumerate(torch.cuda.get_rng_state_all()):
                    tensors[f"torch_cuda_{index}"] = state
            elif device is not None and device.type == "cuda":
                tensors["torch_cuda_0"] = torch.cuda.get_rng_state(device)
        numpy = [str(kind), [int(w) for w in words], int(position), int(has_gauss), float(gauss)]
        return cls({"python": random.getstate(), "numpy": numpy}, tensors)

    def of_rank(self, rank: int) -> RandomState:
        """Under the names that a checkpoint has for a rank's; rank 0's are those of a process."""
        head = _head(rank)
        return RandomState(
            {head + name: value for name, value in self.plain.items()},
            {head + name: value for name, value in self.tensors.items()},
        )

    @classmethod
    def for_rank(
        cls, rank: int, *, plain: dict[str, Any], tensors: Callable[[str], torch.Tensor | None]
    ) -> RandomState:
        """What a checkpoint has for a rank; nothing where it was saved by fewer ranks.

        Args:
            rank: The rank.
            plain: All plain values of the checkpoint.
            tensors: Reads a generator's tensor by name.
        """
        head = _head(rank)
        names = ["torch_cpu", *(f"torch_cuda_{index}" for index in range(_MOST_DEVICES))]
        found = {name: value for name in names if (value := tensors(head + name)) is not None}
        kept = {name: plain[head + name] for name in ("python", "numpy") if head + name in plain}
        return cls(kept, found)

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

    def restore(self, device: torch.device | None = None, *, ranks: int = 1) -> None:
        """Set all generators that were saved and that exist here; arguments as `capture`'s."""
        if "python" in self.plain:
            random.setstate(self.plain["python"])
        if "numpy" in self.plain:
            np.random.set_state(_numpy(self.plain["numpy"]))
        if "torch_cpu" in self.tensors:
            torch.set_rng_state(self.tensors["torch_cpu"])
        if ranks > 1:
            state = self.tensors.get("torch_cuda_0")
            if state is not None and device is not None and device.type == "cuda":
                torch.cuda.set_rng_state(state, device)
        elif torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                state = self.tensors.get(f"torch_cuda_{index}")
                if state is not None:
                    torch.cuda.set_rng_state(state, index)


def _head(rank: int) -> str:
    return f"rank{rank}." if rank else ""


def _numpy(state: Any) -> tuple[str, Any, int, int, float]:
    kind, words, position, has_gauss, gauss = state
    return kind, np.array(words, dtype=np.uint32), position, has_gauss, gauss
