"""Variants with weights on the host, for models larger than the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from forebay.bench.variant import Variant
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SPLIT_STATE_BYTES", "RandomWeights", "Streamed"]

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


class RandomWeights:
    """Weights as a Llama is initialised, made on the device one parameter at a time.

    Args:
        device: Where they are drawn.
    """

    def __init__(self, device: str) -> None:
        self._device = device

    def read(self, names: Sequence[str], like: torch.Tensor) -> torch.Tensor:
        """See `forebay.engine.weight_files.ParameterSource`."""
        del names
        value = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        return value.fill_(1.0) if value.ndim == 1 else value.normal_(std=_DEVIATION)
