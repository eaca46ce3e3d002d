"""What scripts import from `deepspeed.runtime.zero`: the memory estimators of stages 2 and 3."""

from __future__ import annotations

from forebay.runtime.zero import stage3 as stage3
from forebay.runtime.zero import stage_1_and_2 as stage_1_and_2
