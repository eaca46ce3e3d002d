"""One parameter's optimizer state in torch's format: views of where it lives, and loading into it.

Beside torch's own entries there is what completes the fp32 master: `master_low` (the low 16 bits
of a split master) or `master`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forebay.engine.masters import load_master
from forebay.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forebay.engine.record import ParamRecord

__all__ = ["check_entry", "load_entry", "state_of"]

_NEEDED = ("exp_avg", "exp_avg_sq", "step")
_TENSORS = ("exp_avg", "exp_avg_sq", "master", "master_low")


def state_of(record: ParamRecord) -> dict[str, Any]:
    """The entry of a parameter; its tensors view the state's memory."""
    part, slot = record.part, record.slot
    state: dict[str, Any] = {
        "step": torch.tensor(float(record.step)),
        "exp_avg": part.view(part.exp_avg, slot),
        "exp_avg_sq": part.view(part.exp_avg_sq, slot),
    }
    if part.low is not None:
        state["master_low"] = part.view(part.low, slot)
    elif part.dtype is not torch.float32:
        state["master"] = part.view(part.high, slot)
    return state


def check_entry(record: ParamRecord, entry: Mapping[str, Any]) -> None:
    """Raise CheckpointError when an entry is not of this parameter."""
    for name in _NEEDED:
        if name not in entry:
            raise CheckpointError(f"the state of {record.label} has no {name}")
    for name in _TENSORS:
        value = entry.get(name)
        shape = tuple(record.part.view(record.part.exp_avg, record.slot).shape)
        if value is not None and tuple(value.shape) != shape:
            raise CheckpointError(
                f"{name} of {record.label} has shape {tuple(value.shape)}, the parameter {shape}"
            )


def load_entry(record: ParamRecord, entry: Mapping[str, Any]) -> None:
    """Write an entry into the state's memory; an empty one stands for "never updated"."""
    part, slot = record.part, record.slot
    part.await_readers()
    moments = (part.view(part.exp_avg, slot), part.view(part.exp_avg_sq, slot))
    if not entry:
        record.step = 0
        for moment in moments:
            moment.zero_()
        return
    for moment, name in zip(moments, ("exp_avg", "exp_avg_sq"), strict=True):
        moment.copy_(entry[name])
    record.step = int(entry["step"])
    load_master(record, low=entry.get("master_low"), master=entry.get("master"))
