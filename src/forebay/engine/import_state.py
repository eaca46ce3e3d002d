"""A plain torch training state into an engine: a model's state dict and its optimizer's.

What `torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})` kept, loaded
with `weights_only=True`. Moments in any dtype become fp32; a master is the weight, unless the
optimizer's own state has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forebay.engine.restore import write_master
from forebay.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forebay.engine.engine import Engine
    from forebay.engine.optimizer import OffloadedOptimizer
    from forebay.engine.record import ParamRecord

__all__ = ["import_torch_state"]


def import_torch_state(
    engine: Engine,
    optimizer: OffloadedOptimizer,
    *,
    model_state: Mapping[str, torch.Tensor],
    optimizer_state: dict[str, Any] | None = None,
) -> None:
    """Load a plain torch state; float32 weights become exact masters of 16-bit ones.

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
    engine.module.load_state_dict(dict(model_state))
    for record in engine.collector.records:
        source = next((model_state[n] for n in record.slot.names if n in model_state), None)
        if source is None or source.dtype is not torch.float32:
            continue
        record.master_is_loaded = False
        record.loaded_low = None
        _write_whole(record, source)
    engine.settle_masters()


def _write_whole(record: ParamRecord, source: torch.Tensor) -> None:
    flat = source.detach().reshape(-1)
    for start in range(0, flat.numel(), 1 << 20):
        write_master(record, start, flat[start : start + (1 << 20)].cpu())
    torch.autograd.graph.increment_version([record.param])
    record.rebase()
