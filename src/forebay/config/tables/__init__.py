"""The rows of every key, section by section; `forebay.config.keys` says what a row holds."""

from __future__ import annotations

from typing import Final

from forebay.config.keys import Table
from forebay.config.tables import observe, optimizer, own, precision, runtime, training, zero

__all__ = ["TABLE"]

TABLE: Final = Table(
    [
        *training.KEYS,
        *optimizer.KEYS,
        *zero.KEYS,
        *precision.KEYS,
        *observe.KEYS,
        *runtime.KEYS,
        *own.KEYS,
    ]
)
