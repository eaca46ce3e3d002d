"""Masters and working weights: who follows whom when the user changes one of them.

A weight that the user writes becomes the master at the next step. A master that comes with a
state dict waits for its weights, whichever is loaded first: where the two agree (the weight is
the master rounded) the master stays, and where they do not the weight is the user's word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay.engine.unit import assigned_nan
from forebay.errors import UnsupportedError
from forebay.links.lanes import wait
from forebay.optim.master import join, split
from forebay.optim.reference import round_to

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.engine.part import PartStorage
    from forebay.engine.record import ParamRecord

__all__ = [
    "is_written",
    "keep_newer",
    "keep_written",
    "load_master",
    "master_as_of_now",
    "refresh_master",
    "refresh_unseen",
    "settle_stored",
]

# Some 24 bytes of temporary memory per element: 24 MiB at once.
_CHUNK_ELEMENTS = 1 << 20


def refresh_master(record: ParamRecord) -> bool:
    """Take over a working weight that changed since its master last agreed with it.

    Returns:
        Whether the master may have changed.

    Raises:
        UnsupportedError: The parameter was resized, converted or moved to another device.
        TransferError: The last update of the weight failed.
    """
    if record.part.home is not None:
        return _refresh_streamed(record)
    if record.pending:
        return False
    param, part, slot = record.param, record.part, record.slot
    address = part.weights.data_ptr() + slot.offset * part.weights.element_size()
    moved = slot.elements > 0 and param.data_ptr() != address
    if not moved and param._version == record.version and not record.master_is_loaded:
        return False
    _refuse_other_form(record)
    home = part.weight(slot)
    if not moved and param._version == record.version and keep_newer(record):
        return False
    part.await_readers()
    if moved:  # the user assigned p.data
        with torch.no_grad():
            home.copy_(param.data)
        param.data = home
    for ticket in part.last_tickets:
        wait(ticket, f"the last transfer of {record.label}")
    if record.master_is_loaded:
        _settle_loaded(record, home)
    elif not part.high_is_weight:
        part.set_master(slot, home)
    elif part.low is not None:
        part.view(part.low, slot).zero_()
    record.rebase()
    return True


def refresh_unseen(record: ParamRecord) -> None:
    """`refresh_master` for a write that left no trace, so that the weight's word counts anyhow."""
    if record.away is not None and record.pending:
        record.part.await_readers()
        settle_stored(record)  # nothing but what is stored can have been written
        return
    record.version = -1
    refresh_master(record)


def is_written(record: ParamRecord) -> bool:
    """Whether the user wrote or assigned a weight since its master last agreed with it."""
    if record.pending:
        return False  # it views NaN; whoever wrote into that is told when the weight is back
    return record.param._version != record.version or (
        record.slot.elements > 0
        and record.param.data_ptr() != record.part.weight(record.slot).data_ptr()
    )


def keep_written(record: ParamRecord) -> bool:
    """`refresh_master` for a weight on the host whose copy on the device is about to go.

    A master that waits for its weights goes on waiting.
    """
    return any(_written(record)) and _refresh_streamed(record)


def keep_newer(record: ParamRecord) -> bool:
    """Whether a weight that nobody wrote is older than a loaded master, as training wants it.

    Then that master is its next value, and waits for no other weight.
    """
    if record.is_held_back:
        record.master_is_loaded, record.loaded = False, None
        return True
    return False


def _written(record: ParamRecord) -> tuple[bool, bool]:
    """Whether the user assigned `p.data`, and whether he wrote into the copy on the device."""
    if record.away is None:
        return False, False
    here = record.away if record.pending else record.part.weight(record.slot)
    moved = record.slot.elements > 0 and record.param.data_ptr() != here.data_ptr()
    return moved, not record.pending and record.param._version != record.version


def _refresh_streamed(record: ParamRecord) -> bool:
    """The same for a weight that lives on the host, whether its copy on the device is there."""
    param, part, slot = record.param, record.part, record.slot
    moved, written = _written(record)
    if record.away is None or not (moved or written or record.master_is_loaded):
        return False
    if not (moved or written) and keep_newer(record):
        return False
    here = record.away if record.pending else part.weight(slot)
    _refuse_other_form(record)
    part.await_readers()
    for ticket in part.last_tickets:
        wait(ticket, f"the last transfer of {record.label}")
    if moved or written:
        assigned = param.data
        if moved and record.pending and assigned.isnan().any():
            param.data = here
            raise assigned_nan(record.label)
        with torch.no_grad():
            part.store(slot, assigned)
            if moved and not record.pending:
                here.copy_(assigned)
        param.data = here
    settle_stored(record)
    return True


def settle_stored(record: ParamRecord) -> None:
    """A weight that lives on the host has a new value there: its master follows."""
    part, slot = record.part, record.slot
    stored = part.stored(slot)
    if record.master_is_loaded:
        _settle_loaded(record, stored)
    elif not part.high_is_weight:
        part.set_master(slot, stored)
    elif part.low is not None:
        part.view(part.low, slot).zero_()
    record.rebase()


def _refuse_other_form(record: ParamRecord) -> None:
    param, part = record.param, record.part
    now = (tuple(param.shape), param.dtype, param.device)
    then = (record.slot.shape, part.dtype, part.device)
    if now != then:
        raise UnsupportedError(
            f"{record.label} is now {_form(*now)}, but was {_form(*then)} when forebay took over",
            hint="resize, convert and move the model before forebay takes over",
        )


def _form(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    return f"{list(shape)} in {dtype} on {device}"


def load_master(
    record: ParamRecord, *, low: torch.Tensor | None, master: torch.Tensor | None
) -> None:
    """Take the master that came with a state dict; the weights it belongs to may come later.

    Args:
        record: The parameter.
        low: The low half of a split master, int16.
        master: A whole fp32 master.
    """
    part, slot = record.part, record.slot
    record.loaded = None
    if part.dtype is torch.float32 or (low is None and master is None):
        return
    record.master_is_loaded = True
    if part.low is None:
        if master is not None:
            part.set_state("master", slot, master)
        else:
            record.loaded = low
    elif low is not None:
        part.view(part.low, slot).copy_(low)
    elif master is not None:
        record.loaded = master
        target, source = part.view(part.low, slot).reshape(-1), master.reshape(-1)
        for chunk in _chunks(source.numel()):
            target[chunk] = split(source[chunk].float())[1]


def master_as_of_now(record: ParamRecord) -> torch.Tensor:
    """A copy of what is held of the master, in the form of `view`; the weight may wait for a load.

    Where a loaded master waits for its weights it is read as if these had all come: where the two
    agree it is the master, elsewhere the weight. It goes on waiting.
    """
    if not record.master_is_loaded:
        refresh_master(record)  # the weight may have been changed since the last step
    part, slot, loaded = record.part, record.slot, record.loaded
    if not record.master_is_loaded or (record.is_held_back and not is_written(record)):
        return part.master_copy(slot)
    weight = part.share(record.param.detach() if part.home is None else part.stored(slot), slot)
    held = part.state("master", slot) if part.low is None else part.view(part.low, slot)
    here = weight.to(held.device)
    if loaded is not None:
        held = loaded.to(held.device).view(held.shape)
    if held.dtype is torch.int16:  # a low half, which has no word of its own on the weight
        return join(here, held)
    master = held.float()
    return torch.where(round_to(master, part.dtype) == here, master, here.float())


def _settle_loaded(record: ParamRecord, home: torch.Tensor) -> None:
    part, slot = record.part, record.slot
    loaded, record.loaded = record.loaded, None
    record.master_is_loaded = False
    part.sync_high()
    other = None if loaded is None else loaded.reshape(-1)
    here = part.share(home, slot).reshape(-1)
    if part.low is not None:
        if not part.high_is_weight:
            part.view(part.high, slot).copy_(part.share(home, slot))
        if other is not None:
            _settle_low(part.view(part.low, slot).reshape(-1), here, other)
        return
    _settle_whole(part, part.segments[slot.index].offset, here, other)


def _settle_low(low: torch.Tensor, weight: torch.Tensor, master: torch.Tensor) -> None:
    for chunk in _chunks(weight.numel()):
        high = split(master[chunk].float())[0].to(weight.device)
        low[chunk].masked_fill_((high != weight[chunk]).to(low.device), 0)


def _settle_whole(
    part: PartStorage, offset: int, weight: torch.Tensor, low: torch.Tensor | None
) -> None:
    for chunk in _chunks(weight.numel()):
        high = part.read("master", offset + chunk.start, offset + chunk.stop)
        here = weight[chunk].to(high.device)
        if low is not None:
            master = join(here, low[chunk].to(high.device))
        else:
            master = torch.where(round_to(high, part.dtype) == here, high, here.float())
        part.write("master", offset + chunk.start, master)


def _chunks(elements: int) -> Iterator[slice]:
    for start in range(0, elements, _CHUNK_ELEMENTS):
        yield slice(start, min(start + _CHUNK_ELEMENTS, elements))
