"""What is to be trained, beside the model: batch, sequence, precision, optimizer, recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from forebay.errors import ConfigError
from forebay.plan.placement import AccumulationOrder

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "OPTIMIZERS",
    "Attention",
    "Inputs",
    "OptimizerState",
    "Precision",
    "Recompute",
    "Workload",
]


class Precision(Enum):
    """Working dtype and master layout."""

    BF16 = "bf16"
    """bf16 weights whose masters are split: 16 bits beside each weight."""
    FP16 = "fp16"
    """fp16 weights, whole fp32 masters, loss scaling."""
    FP32 = "fp32"
    """fp32 weights that are their own masters."""

    @property
    def dtype(self) -> str:
        """Name of the working dtype."""
        return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[self.value]

    @property
    def item_bytes(self) -> int:
        """Of a weight."""
        return 4 if self is Precision.FP32 else 2

    @property
    def master_bytes(self) -> int:
        """What makes the weight a master, beside it on the device."""
        return {Precision.BF16: 2, Precision.FP16: 4, Precision.FP32: 0}[self]


class Recompute(Enum):
    """What backward computes again."""

    NONE = "none"
    """Nothing: every activation is kept."""
    BLOCKS = "blocks"
    """Each block: only its input is kept (activation checkpointing)."""


class Inputs(Enum):
    """Where the inputs of recomputed blocks wait from their forward to their backward."""

    DEVICE = "device"
    HOST = "host"
    """They leave, all but the last block's, and come back in time: `cpu_checkpointing`."""


class Attention(Enum):
    """How attention is computed."""

    FUSED = "fused"
    """Scores never exist whole: flash attention and its like."""
    EAGER = "eager"
    """Scores of every pair are stored, as before 2022."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """What an optimizer keeps for each parameter.

    Attributes:
        moments: Bytes beside the master.
        built: The name in a configuration that forebay runs; empty where it does not.
        sixteen_bit_master: 1 where the working weight is the master.
    """

    moments: int
    built: str = ""
    sixteen_bit_master: int = 0


OPTIMIZERS: Final[Mapping[str, OptimizerState]] = MappingProxyType(
    {
        "adamw": OptimizerState(moments=8, built="AdamW"),
        "adam": OptimizerState(moments=8, built="Adam"),
        "lamb": OptimizerState(moments=8),
        "lion": OptimizerState(moments=4),
        "momentum": OptimizerState(moments=4),
        "sgd": OptimizerState(moments=0),
        # 16-bit masters: about 6 bytes of state, 10 with a momentum in fp32.
        "adamw-16bit": OptimizerState(moments=4, sixteen_bit_master=1),
        "adamw-16bit-fp32-momentum": OptimizerState(moments=8, sixteen_bit_master=1),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One update's work, on each device.

    Attributes:
        micro_batch: Sequences of one forward on one device.
        accumulation: Forwards for one update.
        sequence: Tokens of a sequence.
        precision: Working dtype.
        optimizer: Name in `OPTIMIZERS`.
        recompute: What backward computes again.
        inputs: Where recomputed blocks' inputs wait.
        attention: How attention is computed.
        tensor_parallel: Devices that share each layer (for published figures; forebay has none).
        order: In which order the micro-batches of an update pass the model.
    """

    micro_batch: int = 1
    accumulation: int = 1
    sequence: int = 2048
    precision: Precision = Precision.BF16
    optimizer: str = "adamw"
    recompute: Recompute = Recompute.BLOCKS
    inputs: Inputs = Inputs.DEVICE
    attention: Attention = Attention.FUSED
    tensor_parallel: int = 1
    order: AccumulationOrder = AccumulationOrder.MICROBATCH

    def __post_init__(self) -> None:
        for name, most in (
            ("micro_batch", 1 << 20),
            ("accumulation", 1 << 20),
            ("sequence", 1 << 24),
        ):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or not 1 <= value <= most:
                raise ConfigError(
                    f"{name} is {value!r}; it must be a whole number from 1 to {most:,}"
                )
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(
                f"optimizer {self.optimizer!r} is not known; known are {', '.join(OPTIMIZERS)}"
            )

    @property
    def tokens(self) -> int:
        """Tokens of one forward on one device."""
        return self.micro_batch * self.sequence

    @property
    def tokens_per_update(self) -> int:
        """Tokens of one update on one device."""
        return self.tokens * self.accumulation

    @property
    def micro_batches_at_once(self) -> int:
        """Micro-batches whose activations are there at the same time."""
        return self.accumulation if self.order is AccumulationOrder.LAYER else 1

    @property
    def moves_inputs(self) -> bool:
        """Whether inputs of blocks leave the device."""
        return self.inputs is Inputs.HOST and self.recompute is Recompute.BLOCKS

    @property
    def backwards(self) -> int:
        """Backwards of an update: one of all micro-batches in layer order."""
        return self.accumulation // self.micro_batches_at_once

    @property
    def state(self) -> OptimizerState:
        """What the optimizer keeps."""
        return OPTIMIZERS[self.optimizer]
