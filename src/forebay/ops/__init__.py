"""Operators under the names of `deepspeed.ops`."""

from __future__ import annotations

from forebay.ops import adagrad as adagrad
from forebay.ops import adam as adam
from forebay.ops import lamb as lamb
from forebay.ops import lion as lion
