"""The names of `deepspeed.runtime.zero.offload_config` for moving state."""

from __future__ import annotations

from forebay.compat.states import OffloadDeviceEnum, OffloadStateTypeEnum

__all__ = ["OffloadDeviceEnum", "OffloadStateTypeEnum"]
