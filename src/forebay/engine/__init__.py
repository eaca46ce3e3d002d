"""The engine and its torch-native face."""

from __future__ import annotations

from forebay.engine.engine import Engine
from forebay.engine.offload import offload, offload_with
from forebay.engine.optimizer import OffloadedOptimizer
from forebay.engine.options import EngineOptions

__all__ = ["Engine", "EngineOptions", "OffloadedOptimizer", "offload", "offload_with"]
