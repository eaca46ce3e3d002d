"""What decides: placements, programs and forecasts. Imports no torch."""

from __future__ import annotations

from forebay.plan.memory import forecast
from forebay.plan.placement import (
    Accumulation,
    MasterLayout,
    Placement,
    SixteenBitMaster,
    UnitPlacement,
    UpdatePlace,
    WeightPlace,
)
from forebay.plan.program import Lane, Op, OpKind, Program, Trigger, TriggerKind, build_program

__all__ = [
    "Accumulation",
    "Lane",
    "MasterLayout",
    "Op",
    "OpKind",
    "Placement",
    "Program",
    "SixteenBitMaster",
    "Trigger",
    "TriggerKind",
    "UnitPlacement",
    "UpdatePlace",
    "WeightPlace",
    "build_program",
    "forecast",
]
