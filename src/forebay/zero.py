"""Building, windows on parameters and external parameters, under the names of `deepspeed.zero`."""

from __future__ import annotations

from forebay.compat.file_weights import file_weights, weights_from
from forebay.compat.gathered import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
)
from forebay.compat.zero_init import Init

__all__ = [
    "GatheredParameters",
    "Init",
    "file_weights",
    "register_external_parameter",
    "unregister_external_parameter",
    "weights_from",
]
