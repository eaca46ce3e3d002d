"""One parameter's optimizer state in torch's format: views of where it lives, and loading into it.

Beside torch's own entries there is what completes the fp32 master: `master_low` (the low 16 bits
of a split master) or `master`, which is there too where the weight is held back and does not have
the other half.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from forebay.engine.masters import load_master, master_as_of_now
from forebay.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.engine.record import ParamRecord

__all__ = ["StateEntry", "check_entry", "load_entry"]

_NEEDED = ("exp_avg", "exp_avg_sq", "step")
_TENSORS = ("exp_avg", "exp_avg_sq", "master", "master_low")


class StateEntry(Mapping[str, torch.Tensor]):
    """The entry of one parameter: each look shows a tensor where it lives now.

    A view of the state's memory, or a copy of what its file holds. State moves (see
    `forebay.engine.state_moves`), so that a view that was kept may show what was.

    Args:
        record: The parameter.
        step: Shows its count of updates; whoever gives it keeps it up to date.
    """

    def __init__(self, record: ParamRecord, *, step: torch.Tensor) -> None:
        self._record = record
        self._step = step

    def __getitem__(self, name: str) -> torch.Tensor:
        """The count of updates, a moment, or what completes the master."""
        part, slot = self._record.part, self._record.slot
        if name not in self._names():
            raise KeyError(name)
        if name == "step":
            return self._step
        if name == "master_low":
            assert part.low is not None
            return part.view(part.low, slot)
        if name == "master" and self._record.master_is_loaded:
            return master_as_of_now(self._record)
        if name == "master" and part.low is not None:
            return part.master_copy(slot)
        return part.state(name, slot)

    def _names(self) -> list[str]:
        part = self._record.part
        names = ["step", "exp_avg", "exp_avg_sq"]
        if part.low is not None:
            return [*names, "master" if self._record.is_held_back else "master_low"]
        return names if part.dtype is torch.float32 else [*names, "master"]

    def __iter__(self) -> Iterator[str]:
        """The names of its tensors."""
        return iter(self._names())

    def __len__(self) -> int:
        """How many there are."""
        return len(self._names())


def check_entry(record: ParamRecord, entry: Mapping[str, Any]) -> None:
    """Raise CheckpointError when an entry is not of this parameter.

    Its tensors are those of all of it, or of the slice that is held here.
    """
    for name in _NEEDED:
        if name not in entry:
            raise CheckpointError(f"the state of {record.label} has no {name}")
    for name in _TENSORS:
        value = entry.get(name)
        shapes = (record.slot.shape, record.part.held_shape(record.slot))
        if value is not None and tuple(value.shape) not in shapes:
            raise CheckpointError(
                f"{name} of {record.label} has shape {tuple(value.shape)}, the parameter "
                f"{shapes[0]}"
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
        part.set_state(name, slot, part.share(entry[name], slot))
    record.step = int(entry["step"])
    low, master = (
        None if value is None else part.share(value, slot)
        for value in (entry.get("master_low"), entry.get("master"))
    )
    load_master(record, low=low, master=master)
