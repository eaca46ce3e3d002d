"""What watches a run: timelines of a few steps, and where each step's time went."""

from __future__ import annotations

from forebay.observe.breakdown import Breakdown, BreakdownLog, break_down, mean_of
from forebay.observe.recorder import Recorder, StepRecord
from forebay.observe.recording import Recording, record

__all__ = [
    "Breakdown",
    "BreakdownLog",
    "Recorder",
    "Recording",
    "StepRecord",
    "break_down",
    "mean_of",
    "record",
]
