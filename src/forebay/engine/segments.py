"""Which segments of a window in layer order use which parameter, and when a unit has its gradient.

Segment 0 reaches up to the first block's call, `i` from the `i`-th call to the next one. Modules
tell who owns a parameter, the graph of one micro-batch who reads it from outside of the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.engine.collector import GradientHook
from forebay.errors import UnsupportedError
from forebay.model.external import external_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from forebay.engine.engine import Engine
    from forebay.engine.record import ParamRecord
    from forebay.engine.unit import Unit

__all__ = ["SegmentUses", "find_uses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentUses:
    """What a window's segments use.

    Attributes:
        shared: For each parameter that several segments use, by index, the first of these.
        shown: For each segment the shared parameters, by index, that its graph adds to; what a
            reentrant checkpoint hides adds nothing there.
        units: For each segment the units whose gradient is complete once all micro-batches have
            gone back through it, in the order of a backward.
    """

    shared: Mapping[int, int]
    shown: Mapping[int, Sequence[int]]
    units: Mapping[int, Sequence[Unit]]


def find_uses(
    engine: Engine, called: Sequence[nn.Module], *, seen: Mapping[int, set[int]]
) -> SegmentUses:
    """What the segments of this window use.

    Args:
        engine: Whose parameters.
        called: The blocks as the forward calls them.
        seen: For each leaf's id, the segments whose graph shows it. A checkpoint hides leaves.
    """
    uses = _uses_by_modules(engine, called)
    shared, last = {}, {}
    added: dict[int, list[int]] = {}
    for record in engine.collector.records:
        used = uses.get(id(record.param), set())
        shown = seen.get(id(record.param), set())
        inside = {one for one in used if isinstance(one, int)}
        numbers = inside | shown
        # What is used outside of blocks and hidden may be used anywhere.
        first = min(numbers, default=0) if shown or len(inside) == len(used) else 0
        last[record.index] = first
        if len(used) > 1 or len(numbers) > 1:
            shared[record.index] = first if len(inside) == len(used) else 0
            last[record.index] = shared[record.index]
            _refuse_watched(record)
            for segment in shown:
                added.setdefault(segment, []).append(record.index)
    units: dict[int, list[Unit]] = {}
    for index in reversed(engine.hooks.order):
        unit = engine.units[index]
        end = min((last[record.index] for record in unit.records), default=0)
        units.setdefault(end, []).append(unit)
    return SegmentUses(shared=shared, shown=added, units=units)


def _refuse_watched(record: ParamRecord) -> None:
    """Refuse hooks on the gradient of a weight that several segments use: each brings a part."""
    after = record.param._post_accumulate_grad_hooks or {}
    others = [hook for hook in after.values() if not isinstance(hook, GradientHook)]
    if record.param._backward_hooks or others:
        raise UnsupportedError(
            f"a hook on {record.label} would be shown parts of its gradient: in layer order each "
            "block that uses the weight brings its own",
            hint='remove the hook, or set forebay.accumulation_order: "microbatch"',
        )


def _uses_by_modules(engine: Engine, called: Sequence[nn.Module]) -> dict[int, set[object]]:
    """For each parameter's id, numbers of segments, and modules outside of the blocks."""
    segments: dict[int, set[int]] = {}
    for place, block in enumerate(called):
        for module in block.modules():
            segments.setdefault(id(module), set()).add(place + 1)
    uses: dict[int, set[object]] = {}
    for module in engine.module.modules():
        where = segments.get(id(module), {("outside", id(module))})
        for param in (*module._parameters.values(), *external_parameters(module)):
            if param is not None:
                uses.setdefault(id(param), set()).update(where)
    return uses
