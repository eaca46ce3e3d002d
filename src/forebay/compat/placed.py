"""What a configuration left to the planner, said when the model is known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from forebay.config.resolved import Row, Source
from forebay.plan.memory import forecast
from forebay.plan.policies import EXACT, DuringBackward, Speculative
from forebay.plan.share import describe_places, host_share
from forebay.units_of_measure import format_bytes

if TYPE_CHECKING:
    from forebay.config.resolved import ResolvedConfig
    from forebay.engine.engine import Engine

__all__ = ["with_placement"]

_RATIO: Final = "zero_optimization.offload_optimizer.ratio"
_UPDATE: Final = "forebay.update"
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
    if config.update.kind == "speculative":
        found[_UPDATE] = _speculative(core)
    if isinstance(core.placement.policy, DuringBackward):
        found[_CHECK] = (None, "units update during backward, from the third window on")
    return replace(config, rows=tuple(_placed(row, found) for row in config.rows))


def _speculative(core: Engine) -> tuple[str | None, str]:
    policy = core.placement.policy
    if isinstance(policy, DuringBackward):
        return None, "nothing is to be decided: updates run during backward, in place"
    if not isinstance(policy, Speculative):
        return "exact", "updates are exact: a second state does not fit, or would not pay"
    exact = replace(core.placement, policy=EXACT)
    more = sum(forecast(core.placement).values()) - sum(forecast(exact).values())
    return None, f"a second state of {format_bytes(more)} of host memory"


def _placed(row: Row, found: dict[str, tuple[str | None, str]]) -> Row:
    if row.path not in found:
        return row
    value, note = found[row.path]
    chosen = row.value if value is None or row.source is Source.GIVEN else value
    source = row.source if row.source is Source.GIVEN else Source.DERIVED
    if row.path == _UPDATE and row.note:
        note = f"{row.note}; {note}"
    return replace(
        row, value=chosen, source=source, note=note if row.path == _UPDATE else row.note or note
    )
