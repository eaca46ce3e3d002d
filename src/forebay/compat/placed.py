"""What a configuration left to the planner, said when the model is known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from forebay.config.resolved import Row, Source
from forebay.plan.policies import DuringBackward
from forebay.plan.share import describe_places, host_share

if TYPE_CHECKING:
    from forebay.config.resolved import ResolvedConfig
    from forebay.engine.engine import Engine

__all__ = ["with_placement"]

_RATIO: Final = "zero_optimization.offload_optimizer.ratio"
_CHECK: Final = "bf16.check_grad_overflow"
_CORES: Final = "zero_optimization.offload_optimizer.cpuadam_cores_perc"


def with_placement(config: ResolvedConfig, core: Engine) -> ResolvedConfig:
    """The configuration with what the planner chose: where each unit updates, and on what cores.

    Args:
        config: The resolved configuration.
        core: The engine that was built from it.
    """
    found: dict[str, tuple[str | None, str]]
    share = f"{host_share(core.placement):.3f}"
    found = {_RATIO: (share, describe_places(core.placement)), _CORES: (None, core.cores.summary)}
    if isinstance(core.placement.policy, DuringBackward):
        found[_CHECK] = (None, "units update during backward, from the third window on")
    return replace(config, rows=tuple(_placed(row, found) for row in config.rows))


def _placed(row: Row, found: dict[str, tuple[str | None, str]]) -> Row:
    if row.path not in found:
        return row
    value, note = found[row.path]
    chosen = row.value if value is None or row.source is Source.GIVEN else value
    source = row.source if row.source is Source.GIVEN else Source.DERIVED
    return replace(row, value=chosen, source=source, note=row.note or note)
