"""Whole values of parameters whose state is sharded over ranks: every rank asks, all get them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay.comm.collectives import Purpose
from forebay.engine.masters import is_written
from forebay.engine.same_loads import is_same

if TYPE_CHECKING:
    from forebay.engine.engine import Engine
    from forebay.engine.part import PartStorage
    from forebay.engine.record import ParamRecord

__all__ = ["bring_whole", "gather_weights", "take_from_rank", "whole_gradient", "whole_of"]


def whole_of(engine: Engine, record: ParamRecord, held: torch.Tensor, *, what: str) -> torch.Tensor:
    """A parameter-shaped copy of a role, from what each rank holds of it.

    Args:
        engine: The engine; every rank calls this for the same parameter at the same point.
        record: The parameter.
        held: What this rank holds, in the form of `PartStorage.view`.
        what: The role, for messages.

    Raises:
        RankError: Another rank asks for something else.
    """
    part, slot = record.part, record.slot
    sharding = engine.placement.sharding
    if sharding.size == 1 or part.elements == part.layout.elements:
        return held.clone().view(slot.shape)
    engine.ranks.refuse_other(f"{what} of {record.label}")
    pieces = [part.layout.shard(rank).segment(slot) for rank in range(sharding.size)]
    longest = max(*(piece.elements for piece in pieces), 1)
    # on the device: between GPUs nothing else travels
    own = torch.zeros(longest, dtype=held.dtype, device=part.device)
    own[: held.numel()] = held.reshape(-1)
    rows = engine.ranks.gather(own)
    joined = [row[: piece.elements] for row, piece in zip(rows, pieces, strict=True)]
    return torch.cat(joined).to(held.device).view(slot.shape)


def whole_gradient(engine: Engine, record: ParamRecord) -> torch.Tensor | None:
    """The mean over ranks of a window's gradient, once it is summed over them; None before."""
    part = record.part
    engine.ranks.departure.settle(engine.collector.program)
    if not part.sums.is_spread:
        return None
    if part.sums.here is not None:
        held = part.view(part.sums.here, record.slot)
    else:
        if part.ticket is not None:
            part.ticket.wait()
        held = part.gradient(record.slot)
    whole = whole_of(engine, record, held.float(), what="the gradient")
    return whole / engine.ranks.departure.ranks


def gather_weights(engine: Engine) -> None:
    """Bring every rank's new slices of weights to all ranks, where each holds them whole.

    Every rank calls it at the same point.
    """
    for unit in engine.units:
        for part in unit.parts:
            bring_whole(engine, part)


def bring_whole(engine: Engine, part: PartStorage) -> None:
    """`gather_weights` of one part."""
    queue = engine.ranks.queue
    if queue is None or part.own_weights.numel() == part.weights.numel():
        return

    def _gather() -> None:
        queue.collectives.gather(part.weights, part.own_weights, purpose=Purpose.STATE)

    queue.submit(_gather, what="new weights").wait()


def take_from_rank(engine: Engine, param: torch.Tensor, *, rank: int) -> None:
    """Let a parameter have the values that it has on one rank; every rank calls it.

    Where no rank wrote it, its master stays as it is. A write through `p.data` shows on the others.

    Raises:
        RankError: Another rank asks for another one.
    """
    if engine.ranks.queue is None or not param.numel():
        return
    record = engine.record_of(param)
    of = f"of shape {tuple(param.shape)}" if record is None else record.label
    engine.ranks.refuse_other(f"rank {rank}'s value of the parameter {of}")
    taken = engine.ranks.take(param.detach().reshape(-1).clone(), rank=rank).view(param.shape)
    if record is not None:
        is_new = is_written(record) or not is_same(param.data, taken)
        told = engine.ranks.tell([float(is_new)], what="whether one rank wrote a weight")
        if not any(new for [new] in told):
            return
    with torch.no_grad():
        param.copy_(taken)
