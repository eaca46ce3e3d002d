"""Optimizers under the names of `deepspeed.ops.adam`."""

from __future__ import annotations

from forebay.compat.absent import (
    ZenFlowCPUAdam,
    ZenFlowSelectiveAdamW,
    ZenFlowSelectiveAdamW_stage3,
)
from forebay.compat.optimizers import DeepSpeedCPUAdam, FusedAdam

__all__ = [
    "DeepSpeedCPUAdam",
    "FusedAdam",
    "ZenFlowCPUAdam",
    "ZenFlowSelectiveAdamW",
    "ZenFlowSelectiveAdamW_stage3",
]
