"""Measures this machine for the planner, and says what works on it."""

from __future__ import annotations

from forebay.probe.environment import Finding, State, report
from forebay.probe.measuring import measure

__all__ = ["Finding", "State", "measure", "report"]
