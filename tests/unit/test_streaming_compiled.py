"""Compiled blocks whose weights live on the host: everything that is needed is held around them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from forebay.engine import EngineOptions, offload_with
from forebay.engine.layer_order import LayerOrder
from forebay.links import FaultScript
from forebay.plan import UpdatePlace, WeightPlace
from forebay.plan.placement import AccumulationOrder

AWAY = EngineOptions(device="cpu", weights=WeightPlace.HOST, update=UpdatePlace.HOST, pool_bytes=0)
RESIDENT = EngineOptions(device="cpu", update=UpdatePlace.DEVICE)
ROOMS = {
    "least": replace(AWAY, fault=FaultScript(seed=1, max_delay_us=200)),
    "by_parameter": replace(AWAY, unit_elements=1),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, how: str, *, kind: bool | None = None, backend: str = "aot_eager") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.kind = kind
        if how == "modules":
            for index, block in enumerate(self.blocks):
                self.blocks[index] = torch.compile(block, backend=backend)
        elif how == "in_place":
            for block in self.blocks:
                block.compile(backend=backend)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            again = self.kind is not None
            x = checkpoint(block, x, use_reentrant=self.kind) if again else block(x)
        return self.last(x)


def _train(model: nn.Module, options: EngineOptions, micro: int = 2):
    source = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = replace(options, clip_norm=1.0, backwards=micro)
    model, optimizer = offload_with(model.bfloat16(), source, options=options)
    by_layers = options.order is AccumulationOrder.LAYER
    layers = LayerOrder(optimizer.engine) if by_layers else None
    losses = []
    for step in range(4):

        def _share(number: int, step: int = step) -> torch.Tensor:
            generator = torch.Generator().manual_seed(10 * step + number)
            x = torch.randn(4, 8, generator=generator).bfloat16()
            loss = model(x).float().square().mean() / micro
            losses.append(loss.item())
            return loss

        shares = [partial(_share, number) for number in range(micro)]
        if layers is not None:
            layers.backward(shares)
        else:
            for share in shares:
                share().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(model(torch.ones(1, 8).bfloat16()).sum().item())
    state = model.state_dict()
    weights = {name.replace("_orig_mod.", ""): value.clone() for name, value in state.items()}
    optimizer.close()
    assert not model(torch.ones(1, 8).bfloat16()).isnan().any()
    return losses, weights


def _assert_same(one, other) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())


KINDS = {"stored": None, "non_reentrant": False, "reentrant": True}


def _cases():
    thin = {("modules", "least", "stored"), ("in_place", "by_parameter", "non_reentrant")}
    for how in ("modules", "in_place"):
        for room in ROOMS:
            for kind in KINDS:
                marks = [] if (how, room, kind) in thin else [pytest.mark.slow]
                yield pytest.param(how, room, kind, id=f"{how}-{room}-{kind}", marks=marks)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("how", "room", "kind"), list(_cases()))
def test_same_bits_as_with_weights_on_the_device(how, room, kind):
    model = partial(Model, how, kind=KINDS[kind])
    _assert_same(_train(model(), RESIDENT), _train(model(), ROOMS[room]))


@pytest.mark.parametrize("how", [pytest.param("modules", marks=pytest.mark.slow), "in_place"])
def test_in_layer_order_too(how):
    layer = replace(AWAY, order=AccumulationOrder.LAYER)
    _assert_same(_train(Model(how), RESIDENT), _train(Model(how), layer))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["modules", "in_place"])
def test_generated_kernels_too(how):
    model = partial(Model, how, backend="inductor")
    _assert_same(_train(model(), RESIDENT), _train(model(), AWAY))
