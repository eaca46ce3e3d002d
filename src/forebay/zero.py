"""Building, windows on parameters and external parameters, under the names of `deepspeed.zero`."""

from __future__ import annotations

from forebay.compat.absent import TiledLinear
from forebay.compat.file_weights import file_weights, weights_from
from forebay.compat.gathered import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
    unwrap_model_for_generation,
)
from forebay.compat.zero_init import Init

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "TiledLinear",
    "file_weights",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
    "weights_from",
]

# How many ranks share a copy is said to `initialize`; building is the same.
MiCS_Init = Init
