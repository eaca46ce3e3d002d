"""Weights loaded by the user's own function, which wants a whole state dict in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forebay.checkpoint.header import DTYPES
from forebay.checkpoint.manifest import Kind, Role
from forebay.engine.masters import refresh_master
from forebay.optim.reference import round_to

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.checkpoint.manifest import ParameterEntry
    from forebay.checkpoint.reader import Checkpoint
    from forebay.engine.engine import Engine
    from forebay.engine.restore import Match

__all__ = ["load_by_hand"]


def load_by_hand(
    engine: Engine, checkpoint: Checkpoint, found: Match, *, by: Callable[..., Any]
) -> None:
    """Give the state dict to the user's function; masters stay where weights agree with them.

    Args:
        engine: Whose module is loaded.
        checkpoint: From where.
        found: Which tensor goes where.
        by: `by(src=state_dict, dst=module)`.
    """
    source = {}
    for entry in checkpoint.manifest.parameters:
        value = _weight(checkpoint, entry)
        source.update(dict.fromkeys(entry.names, value))
    by(src=source, dst=engine.module)
    for record, entry in found.trained:
        if refresh_master(record) and entry.kind is Kind.TRAINED:
            master = checkpoint.read(entry, Role.MASTER, 0, entry.elements)
            weight = record.part.stored(record.slot).reshape(-1).to("cpu")
            agrees = round_to(master, weight.dtype) == weight
            if record.part.dtype is not torch.float32:
                merged = torch.where(agrees, master, weight.float())
                record.part.set_master(record.slot, merged)


def _weight(checkpoint: Checkpoint, entry: ParameterEntry) -> torch.Tensor:
    role = Role.MASTER if entry.kind is Kind.TRAINED else Role.VALUE
    value = checkpoint.read(entry, role, 0, entry.elements).view(entry.shape)
    return round_to(value, DTYPES[entry.dtype]) if entry.kind is Kind.TRAINED else value
