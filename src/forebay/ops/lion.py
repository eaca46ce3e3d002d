"""Names of `deepspeed.ops.lion`, refused when used: only Adam and AdamW have a kernel here."""

from __future__ import annotations

from forebay.compat.absent import DeepSpeedCPULion, FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
