"""What backward recomputes goes with its layer: hooks on saved tensors keep none of it alive."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from forebay.engine import EngineOptions, offload_with
from forebay.engine.options import ActivationPlace
from forebay.plan import UpdatePlace, WeightPlace

RESIDENT = EngineOptions(device="cpu", update=UpdatePlace.DEVICE)
AWAY = {
    "weights": EngineOptions(
        device="cpu", update=UpdatePlace.HOST, weights=WeightPlace.HOST, pool_bytes=0
    ),
    "activations": replace(RESIDENT, activations=ActivationPlace.HOST),
}
_WIDTH, _DEPTH, _ROWS = 16, 8, 512


class _Live(TorchDispatchMode):
    """Bytes of what operators made and somebody still has; `peak` at most."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in torch.utils._pytree.tree_leaves(result):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._made = {key: one for key, one in self._made.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._made.values()))
        return result


class _Block(nn.Module):
    """Saves inputs and outputs of several operators, in modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x):
        return x + self.narrow(torch.sigmoid(self.wide(x).float()).to(x.dtype))


class _Deep(nn.Module):
    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_reentrant = is_reentrant
        self.blocks = nn.ModuleList(_Block() for _ in range(_DEPTH)).to(torch.bfloat16)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return x


def _peak(options: EngineOptions, *, is_reentrant: bool) -> int:
    """Of the second step's backward, in bytes."""
    model = _Deep(is_reentrant)
    source = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _, optimizer = offload_with(model, source, options=options)
    live = _Live()
    for _ in range(2):
        x = torch.ones(_ROWS, _WIDTH, dtype=torch.bfloat16, requires_grad=True)
        with live:
            loss = model(x).float().sum()
            live.peak = 0
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return live.peak


@pytest.mark.parametrize("is_reentrant", [True, False])
@pytest.mark.parametrize("away", AWAY)
def test_one_layer_at_a_time_is_there(away, is_reentrant):
    resident = _peak(RESIDENT, is_reentrant=is_reentrant)
    one_layer = _ROWS * _WIDTH * (2 + 4 * (2 + 4 + 4 + 2))
    assert _peak(AWAY[away], is_reentrant=is_reentrant) < resident + one_layer
