"""What scripts import from `deepspeed.runtime`."""

from __future__ import annotations

from forebay.runtime import zero as zero
