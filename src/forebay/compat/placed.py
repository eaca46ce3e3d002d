"""What a configuration left to the planner, said when the model is known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from forebay.config.kinds import ElementsOf
from forebay.config.lookup import elements_text
from forebay.config.resolved import Row, Source
from forebay.plan.memory import forecast
from forebay.plan.placement import UpdatePlace, WeightPlace
from forebay.plan.policies import EXACT, DuringBackward, Speculative
from forebay.plan.share import describe_places, host_share
from forebay.units_of_measure import format_bytes

if TYPE_CHECKING:
    from forebay.config.resolved import ResolvedConfig
    from forebay.engine.engine import Engine
    from forebay.plan.placement import Placement

__all__ = ["with_placement"]

_STATE: Final = "zero_optimization.offload_optimizer"
_WEIGHTS: Final = "zero_optimization.offload_param"
_RATIO: Final = f"{_STATE}.ratio"
_UPDATE: Final = "forebay.update"
_CHECK: Final = "bf16.check_grad_overflow"
_CORES: Final = f"{_STATE}.cpuadam_cores_perc"
_BUFFERS: Final = ("buffer_count", "buffer_size")
_ALL_FITS: Final = "changes nothing: all of it is in memory"


def with_placement(config: ResolvedConfig, core: Engine) -> ResolvedConfig:
    """The configuration with what the planner chose: places, cores, and what files pass through.

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
    rows = (_placed(row, found) for row in config.rows)
    used = _buffers(config, core.placement)
    return replace(config, rows=tuple(_used(row, used) for row in rows))


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


def _buffers(config: ResolvedConfig, placement: Placement) -> dict[str, tuple[str, str]]:
    """The value in use and a note of each key about buffers for files."""
    spec, dtype = config.zero.nvme, config.precision.dtype
    if spec is None:
        return {}
    found = dict.fromkeys((f"{_STATE}.{name}" for name in _BUFFERS), ("", _ALL_FITS))
    found |= dict.fromkeys((f"{_WEIGHTS}.{name}" for name in _BUFFERS), ("", _ALL_FITS))
    if any(unit.update is UpdatePlace.NVME for unit in placement.units):
        used = placement.buffers
        text = elements_text(used.piece_elements, ElementsOf.STATE, dtype=dtype)
        notes = []
        if used.count != spec.buffer_count:
            notes.append(f"{used.count} let pieces come and go")
        if used.held:
            notes.append(f"{used.held} pieces stay in memory")
        found[f"{_STATE}.buffer_count"] = ("", ", ".join(notes))
        found[f"{_STATE}.buffer_size"] = (text, "")
    if any(unit.weights is WeightPlace.NVME for unit in placement.units):
        pieces = (placement.buffers, placement.weight_buffers)
        most = min(one.piece_elements for one in pieces)
        text = elements_text(most, ElementsOf.WEIGHTS, dtype=dtype)
        found[f"{_WEIGHTS}.buffer_count"] = ("", "")
        found[f"{_WEIGHTS}.buffer_size"] = (text, "")
    return found


def _used(row: Row, used: dict[str, tuple[str, str]]) -> Row:
    if row.path not in used:
        return row
    value, note = used[row.path]
    if not value or value == row.value:
        return replace(row, note=note or row.note)
    if row.source is Source.GIVEN:
        return replace(row, note=f"in use: {value}")
    return replace(row, value=value, source=Source.DERIVED)
