"""The DeepSpeed JSON and the `forebay` section: read, checked key by key, resolved to numbers.

    reader   file, dict or base64 -> plain dict; syntax errors with their line
    tables   what is known of every key: type, default, honoured or refused, meaning
    schema   pydantic models made from the tables; unknown keys and wrong types end here
    resolve  values and what the caller knows (`Facts`) -> `ResolvedConfig`
    resolved the frozen result, which the engine reads

This package's own namespace loads neither pydantic nor torch; `forebay.config.resolve` and
`forebay.config.reference` load pydantic.
"""

from __future__ import annotations

from forebay.config.facts import Facts
from forebay.config.resolved import (
    BatchSpec,
    BudgetSpec,
    CheckpointSpec,
    LossScaleSpec,
    OptimizerSpec,
    PrecisionSpec,
    ResolvedConfig,
    Row,
    SchedulerSpec,
    Source,
    TensorBoardSpec,
    ZeroSpec,
)

__all__ = [
    "BatchSpec",
    "BudgetSpec",
    "CheckpointSpec",
    "Facts",
    "LossScaleSpec",
    "OptimizerSpec",
    "PrecisionSpec",
    "ResolvedConfig",
    "Row",
    "SchedulerSpec",
    "Source",
    "TensorBoardSpec",
    "ZeroSpec",
]
