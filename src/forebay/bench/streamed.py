"""Variants with weights on the host, for models larger than the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from forebay.bench.variant import Variant
from forebay.errors import ConfigError
from forebay.model.unbuilt import UnbuiltWeight

__all__ = ["SPLIT_STATE_BYTES", "Streamed", "draw_later"]

# Two moments and the low half of the master.
SPLIT_STATE_BYTES = 10

_DEVIATION = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """What a variant `streamed[+P[+R]][+host]` asks for.

    Attributes:
        pool_bytes: Device bytes for weights; 0 for what is needed at least.
        resident: Share of the parameters whose state and weights stay on the device.
        updates_on_host: Whether the others' state never visits the device.
    """

    pool_bytes: int = 0
    resident: float = 0.0
    updates_on_host: bool = False

    @classmethod
    def of(cls, variant: str) -> Streamed | None:
        """What a variant's name says, its endings aside; None for other variants.

        Raises:
            ConfigError: Its numbers are none.
        """
        name, *rest = Variant.parse(variant).base.split("+")
        if name != "streamed":
            return None
        on_host = rest[-1:] == ["host"]
        numbers = rest[:-1] if on_host else rest
        try:
            pool, resident = (float(number) for number in [*numbers, *["0", "0"][len(numbers) :]])
        except ValueError as error:
            raise ConfigError(
                f"variant {variant!r} is not known",
                hint="streamed, streamed+4 (GB of weights on the device), streamed+4+0.5 (and half "
                "of the parameters resident), each with +host, +layer and +offload",
            ) from error
        return cls(pool_bytes=int(pool * 1e9), resident=resident, updates_on_host=on_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RandomWeight:
    """A `WeightRecipe`: a weight as a Llama is initialised, made on the device.

    Attributes:
        device: Where it is drawn.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    def make(self) -> torch.Tensor:
        """See `WeightRecipe`."""
        value = torch.empty(self.size, dtype=self.dtype, device=self.device)
        return value.fill_(1.0) if value.ndim == 1 else value.normal_(std=_DEVIATION)

    def fingerprint(self) -> str:
        """See `WeightRecipe`."""
        return f"random {self.size} {self.dtype}"


def draw_later(model: nn.Module, *, device: str) -> None:
    """Let a model on the meta device be given random weights, one at a time, by the engine.

    Args:
        model: Its parameters stay the same objects.
        device: Where weights are drawn.
    """
    for param in model.parameters():
        recipe = _RandomWeight(
            size=tuple(param.shape), stride=param.stride(), dtype=param.dtype, device=device
        )
        weight = UnbuiltWeight(recipe, dtype=param.dtype)
        unbuilt = nn.Parameter(weight, requires_grad=param.requires_grad)
        torch.utils.swap_tensors(param, unbuilt)
