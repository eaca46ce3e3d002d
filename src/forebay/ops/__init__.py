"""Operators under the names of `deepspeed.ops`."""

from __future__ import annotations

from forebay.ops import adam as adam
