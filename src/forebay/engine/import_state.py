"""A plain torch training state into an engine: a model's state dict and its optimizer's.

What `torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})` kept, loaded
with `weights_only=True`. Moments in any dtype become fp32; a master is the weight, unless the
optimizer's own state has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from forebay.engine.masters import settle_stored
from forebay.engine.restore import write_master
from forebay.engine.snapshot import untrained_tensors
from forebay.engine.whole_state import gather_weights
from forebay.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from forebay.engine.engine import Engine
    from forebay.engine.optimizer import OffloadedOptimizer
    from forebay.engine.record import ParamRecord

__all__ = ["import_torch_state"]

# Splitting takes some 24 bytes of temporary memory per element.
_PIECE: Final = 1 << 20


def import_torch_state(
    engine: Engine,
    optimizer: OffloadedOptimizer,
    *,
    model_state: Mapping[str, torch.Tensor],
    optimizer_state: dict[str, Any] | None = None,
) -> None:
    """Load a plain torch state; float32 weights become exact masters of 16-bit ones.

    Over ranks every rank calls it with the same state, and keeps what it holds.

    Args:
        engine: Where to.
        optimizer: The optimizer over it, with the same groups as the one that was saved.
        model_state: `model.state_dict()`.
        optimizer_state: `torch.optim.Adam(W).state_dict()`; None leaves moments as they are.

    Raises:
        CheckpointError: Names, shapes or groups differ; nothing was changed.
    """
    state = dict(engine.module.state_dict())
    missing, unknown = (
        sorted(state.keys() - model_state.keys()),
        sorted(model_state.keys() - state.keys()),
    )
    if missing or unknown:
        raise CheckpointError(
            f"the state is of another model: {len(missing)} tensors are missing and "
            f"{len(unknown)} unknown, the first is {(missing or unknown)[0]}"
        )
    for name, value in state.items():
        if value.shape != model_state[name].shape:
            raise CheckpointError(
                f"{name} has the shape {list(model_state[name].shape)} in the state and "
                f"{list(value.shape)} in the model"
            )
    if optimizer_state is not None:
        optimizer.load_state_dict(optimizer_state)
    engine.quiesce("import_torch_state")
    engine.zero_grad()
    engine.streaming.stored_changed()
    for record in engine.collector.records:
        _import_weight(record, _one_of(record.slot.names, model_state))
    for named in untrained_tensors(engine):
        named.write(_one_of(named.names, model_state))
    gather_weights(engine)
    engine.settle_masters()


def _one_of(names: Iterable[str], state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return next(state[name] for name in names if name in state)


def _import_weight(record: ParamRecord, source: torch.Tensor) -> None:
    if source.dtype is torch.float32 or not record.master_is_loaded:
        record.master_is_loaded = False
        record.loaded = None
        _write_held(record, source)
        return
    # its master came with the optimizer's state, and stays where the weight is its rounding
    with torch.no_grad():
        record.part.store(record.slot, source.to(record.part.dtype))
    if record.part.home is not None:
        settle_stored(record)
    else:
        torch.autograd.graph.increment_version([record.param])


def _write_held(record: ParamRecord, source: torch.Tensor) -> None:
    flat, held = source.detach().reshape(-1), record.segment
    last = held.start + held.elements
    for start in range(held.start, last, _PIECE):
        piece = flat[start : min(start + _PIECE, last)]
        write_master(record, start, piece.to("cpu", torch.float32))
    torch.autograd.graph.increment_version([record.param])
    record.rebase()
