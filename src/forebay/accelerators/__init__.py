"""The devices that compute: one small interface, with `cuda` and `cpu` behind it."""

from __future__ import annotations

from forebay.accelerators.base import Accelerator, Event
from forebay.accelerators.select import accelerator_for

__all__ = ["Accelerator", "Event", "accelerator_for"]
