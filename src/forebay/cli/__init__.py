"""The command line: one file per verb, no logic."""

from __future__ import annotations
