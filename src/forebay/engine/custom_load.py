"""Weights loaded by the user's own function, which wants a whole state dict in host memory.

Over ranks every one calls it with the same state dict, as in DeepSpeed: what it writes on a rank
counts for the slices that are that rank's.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from forebay.checkpoint.header import DTYPES
from forebay.checkpoint.manifest import Kind, Role
from forebay.comm.together import Together
from forebay.engine.masters import refresh_master
from forebay.engine.restore import write_master
from forebay.engine.whole_state import gather_weights
from forebay.errors import CheckpointError
from forebay.optim.reference import round_to

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.checkpoint.manifest import ParameterEntry
    from forebay.checkpoint.reader import Checkpoint
    from forebay.engine.engine import Engine
    from forebay.engine.record import ParamRecord
    from forebay.engine.restore import Match

__all__ = ["load_by_hand"]

# Splitting takes some 24 bytes of temporary memory per element.
_PIECE: Final = 1 << 20


def load_by_hand(
    engine: Engine, checkpoint: Checkpoint, found: Match, *, by: Callable[..., Any]
) -> None:
    """Give the state dict to the user's function; masters stay where weights agree with them.

    Args:
        engine: Whose module is loaded.
        checkpoint: From where.
        found: Which tensor goes where.
        by: `by(src=state_dict, dst=module)`.

    Raises:
        CheckpointError: It failed on another rank.
    """
    source = {}
    for entry in checkpoint.manifest.parameters:
        value = _weight(checkpoint, entry)
        source.update(dict.fromkeys(entry.names, value))
    together = Together.of(engine.options.group, "loading", otherwise=CheckpointError)
    together.run(partial(by, src=source, dst=engine.module), what="custom_load_fn")
    engine.quiesce("load_checkpoint")
    engine.streaming.take_over()
    for record, entry in found.trained:
        refresh_master(record)
        if entry.kind is Kind.TRAINED and record.part.dtype is not torch.float32:
            _keep_masters(checkpoint, record, entry)
    gather_weights(engine)


def _keep_masters(checkpoint: Checkpoint, record: ParamRecord, entry: ParameterEntry) -> None:
    """Where a weight is what the checkpoint's master rounds to, that is its master."""
    held = record.segment
    record.part.sync_high()
    for start in range(0, held.elements, _PIECE):
        end = min(start + _PIECE, held.elements)
        first = held.start + start
        master = checkpoint.read(entry, Role.MASTER, first, held.start + end).float()
        weight = record.part.read_own_weights(held.offset + start, held.offset + end).to("cpu")
        agrees = round_to(master, weight.dtype) == weight
        write_master(record, first, torch.where(agrees, master, weight.float()))


def _weight(checkpoint: Checkpoint, entry: ParameterEntry) -> torch.Tensor:
    role = Role.MASTER if entry.kind is Kind.TRAINED else Role.VALUE
    value = checkpoint.read(entry, role, 0, entry.elements).view(entry.shape)
    return round_to(value, DTYPES[entry.dtype]) if entry.kind is Kind.TRAINED else value
