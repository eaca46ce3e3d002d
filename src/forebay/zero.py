"""Building, windows on parameters and external parameters, under the names of `deepspeed.zero`."""

from __future__ import annotations

from forebay.compat.gathered import (
    GatheredParameters,
    Init,
    register_external_parameter,
    unregister_external_parameter,
    weights_from,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "register_external_parameter",
    "unregister_external_parameter",
    "weights_from",
]
