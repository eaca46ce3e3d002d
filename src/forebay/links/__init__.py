"""What moves bytes: the lanes between device and host, and their fake."""

from __future__ import annotations

from forebay.links.fake import FaultScript
from forebay.links.lanes import Lanes

__all__ = ["FaultScript", "Lanes"]
