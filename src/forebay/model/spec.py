"""What a model is to forebay: its trainable parameters and the units that they move in.

Pure values without torch, so that a planner can make them up for a model that does not exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["ModelSpec", "ParamSpec", "UnitSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One trainable parameter.

    Attributes:
        index: Position among the model's trainable parameters.
        names: All of its names in the module tree.
        shape: Its shape.
        dtype: Working dtype: "float32", "bfloat16" or "float16".
        group: Index of its parameter group in the optimizer.
    """

    index: int
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    group: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """Parameters that move and update together, usually one block."""

    name: str
    params: tuple[ParamSpec, ...]

    @property
    def elements(self) -> int:
        """Number of elements of all its parameters."""
        return sum(param.elements for param in self.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The trainable part of a model, in module order."""

    units: tuple[UnitSpec, ...]

    @property
    def elements(self) -> int:
        """Number of trainable elements."""
        return sum(unit.elements for unit in self.units)
