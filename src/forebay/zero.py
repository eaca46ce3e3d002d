"""Building, windows on parameters and external parameters, under the names of `deepspeed.zero`."""

from __future__ import annotations

from forebay.compat.gathered import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
    weights_from,
)
from forebay.compat.zero_init import Init

__all__ = [
    "GatheredParameters",
    "Init",
    "register_external_parameter",
    "unregister_external_parameter",
    "weights_from",
]
