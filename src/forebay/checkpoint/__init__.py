"""Checkpoints as files: the format, reading and writing it, and what one holds.

It knows folders, manifests, tensors and checksums; it knows no engine. See
`docs/reference/checkpoint-format.md`.
"""

from __future__ import annotations
