"""What scripts import from `deepspeed.runtime.zero`: memory estimators, and what may move."""

from __future__ import annotations

from forebay.runtime.zero import offload_config as offload_config
from forebay.runtime.zero import stage3 as stage3
from forebay.runtime.zero import stage_1_and_2 as stage_1_and_2
