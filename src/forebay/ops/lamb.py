"""Names of `deepspeed.ops.lamb`, refused when used: only Adam and AdamW have a kernel here."""

from __future__ import annotations

from forebay.compat.absent import FusedLamb

__all__ = ["FusedLamb"]
