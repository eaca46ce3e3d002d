"""One parameter's optimizer state in torch's format: views of where it lives, and loading into it.

Beside torch's own entries there is what completes the fp32 master: `master_low` (the low 16 bits
of a split master) or `master`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from forebay.engine.masters import load_master
from forebay.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.engine.record import ParamRecord

__all__ = ["FileEntry", "check_entry", "load_entry", "state_of"]

_NEEDED = ("exp_avg", "exp_avg_sq", "step")
_TENSORS = ("exp_avg", "exp_avg_sq", "master", "master_low")


class FileEntry(Mapping[str, torch.Tensor]):
    """The entry of a parameter whose state is in a file: each look at a tensor reads it anew."""

    def __init__(self, record: ParamRecord, *, step: torch.Tensor) -> None:
        self._record = record
        self._step = step
        self._names = ["step", "exp_avg", "exp_avg_sq"]
        if record.part.dtype is not torch.float32:
            self._names.append("master")

    def __getitem__(self, name: str) -> torch.Tensor:
        """The count of updates, or a copy of what the file holds."""
        if name not in self._names:
            raise KeyError(name)
        if name == "step":
            return self._step
        return self._record.part.state(name, self._record.slot)

    def __iter__(self) -> Iterator[str]:
        """The names of its tensors."""
        return iter(self._names)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._names)


def state_of(record: ParamRecord, *, step: torch.Tensor) -> Mapping[str, Any]:
    """The entry of a parameter; its tensors view the state's memory, or are read from its file.

    Args:
        record: The parameter.
        step: Shows its count of updates; whoever gives it keeps it up to date.
    """
    part, slot = record.part, record.slot
    if part.files is not None:
        return FileEntry(record, step=step)
    state: dict[str, Any] = {
        "step": step,
        "exp_avg": part.state("exp_avg", slot),
        "exp_avg_sq": part.state("exp_avg_sq", slot),
    }
    if part.low is not None:
        state["master_low"] = part.view(part.low, slot)
    elif part.dtype is not torch.float32:
        state["master"] = part.state("master", slot)
    return state


def check_entry(record: ParamRecord, entry: Mapping[str, Any]) -> None:
    """Raise CheckpointError when an entry is not of this parameter."""
    for name in _NEEDED:
        if name not in entry:
            raise CheckpointError(f"the state of {record.label} has no {name}")
    for name in _TENSORS:
        value = entry.get(name)
        shape = tuple(record.part.view(record.part.own_weights, record.slot).shape)
        if value is not None and tuple(value.shape) != shape:
            raise CheckpointError(
                f"{name} of {record.label} has shape {tuple(value.shape)}, the parameter {shape}"
            )


def load_entry(record: ParamRecord, entry: Mapping[str, Any]) -> None:
    """Write an entry into the state's memory; an empty one stands for "never updated"."""
    part, slot = record.part, record.slot
    part.await_readers()
    if not entry:
        record.step = 0
        for name in ("exp_avg", "exp_avg_sq"):
            part.set_state(name, slot, torch.zeros(1).expand(part.segments[slot.index].elements))
        return
    for name in ("exp_avg", "exp_avg_sq"):
        part.set_state(name, slot, entry[name])
    record.step = int(entry["step"])
    load_master(record, low=entry.get("master_low"), master=entry.get("master"))
