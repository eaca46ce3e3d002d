"""Micro-batches in layer order train with the bits of micro-batches one after the other."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from forebay.engine import EngineOptions, offload_with
from forebay.engine.layer_order import LayerOrder
from forebay.engine.options import ActivationPlace
from forebay.links import FaultScript
from forebay.plan import UpdatePlace
from forebay.plan.placement import AccumulationOrder
from forebay.plan.policies import Delayed, Speculative
from numerics.layer_cases import LAYER, by_layers, train
from numerics.real_models import CHECKPOINTS, DEVICE, STREAMED, Job, by_offload
from numerics.training import assert_same_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning"),
    pytest.mark.usefixtures("deterministic"),
]
LATE = FaultScript(seed=3, max_delay_us=300)
ROOMS = {
    "resident": EngineOptions(update=UpdatePlace.HOST),
    "on_device": EngineOptions(update=UpdatePlace.DEVICE),
    "streamed": STREAMED,
    "late": replace(STREAMED, fault=LATE, piece_elements=200),
    "state_too": replace(STREAMED, update=UpdatePlace.STREAMED, fault=LATE),
    "activations": replace(STREAMED, activations=ActivationPlace.HOST, fault=LATE),
    "by_parameter": replace(STREAMED, unit_elements=1, piece_elements=100),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@functools.cache
def _usual(job: Job):
    return by_offload(job, place=UpdatePlace.DEVICE)


def _cases():
    thin = {
        ("llama", "streamed", "stored"),
        ("llama", "resident", "reentrant"),
        ("tied_llama", "late", "reentrant"),
        ("tied_llama", "on_device", "stored"),
        ("qwen2", "activations", "non_reentrant"),
        ("mixtral", "state_too", "non_reentrant"),
        ("dense_mixtral", "by_parameter", "stored"),
    }
    for model in ("llama", "tied_llama", "qwen2", "mixtral", "dense_mixtral"):
        for room in ROOMS:
            for kind in CHECKPOINTS:
                if room == "activations" and kind == "stored":
                    continue  # nothing is checkpointed, so nothing waits on the host
                for dtype in DTYPES:
                    kept = (model, room, kind) in thin and (dtype == "bf16" or room == "late")
                    yield pytest.param(
                        model,
                        room,
                        kind,
                        dtype,
                        id=f"{model}-{room}-{kind}-{dtype}",
                        marks=[] if kept else [pytest.mark.slow],
                    )


@pytest.mark.parametrize(("model", "room", "kind", "dtype"), list(_cases()))
def test_same_bits(model, room, kind, dtype):
    job = Job(model, dtype=DTYPES[dtype], micro=3, checkpoints=kind)
    assert_same_bits(_usual(job), by_layers(job, ROOMS[room]))


def test_same_bits_under_save_on_cpu():
    job = Job("tied_llama", dtype=torch.bfloat16, micro=3, checkpoints="non_reentrant")
    trained = by_layers(job, STREAMED, around=torch.autograd.graph.save_on_cpu)
    assert_same_bits(_usual(job), trained)


class _Shared(nn.Module):
    """A weight that every second block shares."""

    def __init__(self, kind: bool | None = None, blocks: int = 5, every: int = 2) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(_Block() for _ in range(blocks))
        for block in self.blocks[::every]:
            block.mix.weight = self.blocks[0].mix.weight
        self.last = nn.Linear(16, 4)
        self.kind = kind

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            block.kind = self.kind
            x = block(x)
        return self.last(x)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16, bias=False)
        self.own = nn.Linear(16, 16)
        self.kind: bool | None = None

    def forward(self, x):
        if self.kind is None:
            return self._inner(x)
        return checkpoint(self._inner, x, use_reentrant=self.kind)

    def _inner(self, x):
        return x + torch.tanh(self.own(torch.tanh(self.mix(x))))


@pytest.mark.parametrize("kind", [None, False, True], ids=["stored", "non_reentrant", "reentrant"])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str
)
def test_a_weight_that_three_blocks_share(kind, dtype):
    usual = train(_Shared(kind).to(dtype), options=STREAMED)
    layers = train(_Shared(kind).to(dtype), options=replace(STREAMED, order=LAYER))
    assert usual[1] == layers[1]
    for name, value in usual[0].items():
        assert torch.equal(value, layers[0][name]), name


class _Often(_Shared):
    """Outside of blocks a weight is read three times, two of them before the first."""

    def forward(self, x):
        x = torch.tanh(self.mixed(self.mixed(self.first(x))))
        for block in self.blocks:
            x = block(x)
        return self.last(self.mixed(x))

    @property
    def mixed(self):
        return self.blocks[1].mix


class _TwiceBlock(_Block):
    def forward(self, x):
        return super().forward(self.mix(super().forward(x)))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_weight_that_segments_use_more_than_once(dtype):
    """Its uses are added one by one as in the usual order, without brackets around a segment."""

    def model() -> nn.Module:
        made = _Often(blocks=3)
        shared = made.blocks[1].mix
        made.blocks = nn.ModuleList(_TwiceBlock() for _ in range(3))
        for block in made.blocks:
            block.mix = shared
        torch.manual_seed(6)
        for param in made.parameters():
            nn.init.normal_(param, std=0.3)
        return made.to(dtype)

    usual = train(model(), options=STREAMED)
    layers = train(model(), options=replace(STREAMED, order=LAYER))
    assert usual[1] == layers[1]
    for name, value in usual[0].items():
        assert torch.equal(value, layers[0][name]), name


@pytest.mark.parametrize("policy", [Speculative(), Delayed(warm_up_steps=1)], ids=str)
def test_other_updates_in_layer_order(policy):
    """What they are one after the other: taken during backward, or one step behind."""
    taken = []

    def _weights(order: AccumulationOrder):
        options = EngineOptions(update=UpdatePlace.HOST, policy=policy, order=order, fault=LATE)
        return train(_Shared().bfloat16(), options=options, clip=1e3, look=_look)[0]

    def _look(engine) -> None:
        taken.append(getattr(engine.collector.policy, "taken", None))

    usual, layers = _weights(AccumulationOrder.MICROBATCH), _weights(LAYER)
    assert all(torch.equal(value, layers[name]) for name, value in usual.items())
    assert taken[0] == taken[1] != 0


def test_weights_go_up_once_an_update_and_pass_whatever_the_micro_batches():
    """Twice 2 bytes per parameter, less what stays where passes turn; not 2 per micro-batch."""

    def up(order: AccumulationOrder, micro: int) -> int:
        model = _Shared(blocks=12, every=12).bfloat16()
        options = replace(STREAMED, order=order)
        return train(model, options=options, micro=micro)[2][-1]

    model = _Shared(blocks=12, every=12)
    count = sum(param.numel() for param in model.parameters())
    assert up(LAYER, 2) == up(LAYER, 6) <= 4 * count
    assert up(LAYER, 6) > 2 * count
    assert up(AccumulationOrder.MICROBATCH, 6) > 4 * up(LAYER, 6)


def test_sums_take_the_device_memory_of_single_units():
    """All of a unit's addends come one after the other: its sum leaves before the next begins."""
    model = _Shared(blocks=8)
    source = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = replace(STREAMED, device=DEVICE, backwards=4, order=LAYER)
    model, optimizer = offload_with(model, source, options=options)
    open_at_once = []

    def _look(*_args) -> None:
        records = optimizer.engine.collector.records
        open_at_once.append(len({r.unit for r in records if r.total is not None}))

    for block in model.blocks:
        block.own.register_full_backward_hook(_look)
    layers = LayerOrder(optimizer.engine)
    for _ in range(2):
        layers.backward([lambda: model(torch.ones(2, 8)).sum()] * 4)
        optimizer.step()
        optimizer.zero_grad()
    assert max(open_at_once) <= 2
    optimizer.close()


def test_weights_in_place_meet_no_surprise():
    """A block may write into what it is given, as it may in the usual order."""

    class _Writes(_Block):
        def forward(self, x):
            x += torch.tanh(self.own(x.clone()))
            return x

    def model() -> nn.Module:
        made = _Shared(blocks=2)
        made.blocks = nn.ModuleList(_Writes() for _ in range(3))
        torch.manual_seed(5)
        for param in made.parameters():
            nn.init.normal_(param, std=0.1)
        return made

    usual = train(model(), options=STREAMED)
    layers = train(model(), options=replace(STREAMED, order=LAYER))
    for name, value in usual[0].items():
        assert torch.equal(value, layers[0][name]), name
