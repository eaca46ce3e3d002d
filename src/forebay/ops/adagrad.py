"""Names of `deepspeed.ops.adagrad`, refused when used: only Adam and AdamW have a kernel here."""

from __future__ import annotations

from forebay.compat.absent import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
