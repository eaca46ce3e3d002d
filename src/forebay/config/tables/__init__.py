"""The rows of every key, section by section; `forebay.config.keys` says what a row holds."""

from __future__ import annotations

from typing import Final

from forebay.config import keys
from forebay.config.tables import (
    observe,
    offload,
    optimizer,
    own,
    precision,
    runtime,
    training,
    zero,
)

__all__ = ["TABLE"]

TABLE: Final = keys.Table(
    [
        *training.KEYS,
        *optimizer.KEYS,
        *zero.KEYS,
        *offload.KEYS,
        *precision.KEYS,
        *observe.KEYS,
        *runtime.KEYS,
        *own.KEYS,
    ]
)
