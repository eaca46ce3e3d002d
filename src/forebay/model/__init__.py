"""What a model is made of: parameters, units, and where every element lies."""

from __future__ import annotations

from forebay.model.layout import ParamSlot, PartLayout, UnitLayout, layout_unit
from forebay.model.spec import ModelSpec, ParamSpec, UnitSpec

__all__ = [
    "ModelSpec",
    "ParamSlot",
    "ParamSpec",
    "PartLayout",
    "UnitLayout",
    "UnitSpec",
    "layout_unit",
]
