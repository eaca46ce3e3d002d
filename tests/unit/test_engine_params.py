"""Which parameters are trained: frozen, tied, absent, odd in shape, of several dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forebay import UnsupportedError
from forebay.engine import EngineOptions, offload_with
from forebay.tiers.ledger import Role, Tier
from unit.engine_cases import CPU, PLACES, adamw, batches, close, mlp, offloaded, run, same, weights


class Odd(nn.Module):
    """A 0-dim gain, an empty parameter and vectors of one given size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(size)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.first = nn.Parameter(torch.randn(size, generator=generator))
        self.second = nn.Parameter(torch.randn(size, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = self.gain * self.first * self.one + self.second
        return scaled * x.mean() + self.empty.sum()


@pytest.mark.parametrize("size", [1, 199, 255, 256, 257, 4095, 4096, 4097])
@pytest.mark.parametrize("place", ["host", "resident", "streamed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sizes_and_shapes(dtype, place, size):
    plain, model = Odd(size), Odd(size).to(dtype)
    losses = run(plain, adamw(plain))
    with offloaded(model, PLACES[place]) as optimizer:
        mine = run(model, optimizer)
        assert model.empty.shape == (0, 3)
        if dtype is torch.float32:
            assert mine == pytest.approx(losses, rel=1e-4)
            assert close(weights(model), weights(plain))
        else:
            reference = Odd(size).to(dtype)
            with offloaded(reference, PLACES["resident_whole"]) as other:
                assert run(reference, other) == mine
                assert same(weights(model), weights(reference))


def test_only_empty_parameters():
    model = nn.ParameterDict({"empty": nn.Parameter(torch.empty(0))})
    with offloaded(model) as optimizer:
        model["empty"].sum().backward()
        optimizer.step()
        assert optimizer.last_grad_norm == 0.0


def test_frozen_parameters_cost_nothing_and_stay():
    model = mlp()
    model[0].requires_grad_(False)
    frozen = model[0].weight.clone()
    with offloaded(model) as optimizer:
        run(model, optimizer)
        assert torch.equal(model[0].weight, frozen)
        assert set(optimizer.state) == set(model[2].parameters())
        trained = sum(p.numel() for p in model[2].parameters())
        elements = sum(p.layout.elements for u in optimizer.engine.units for p in u.parts)
        assert trained <= elements < trained + 2 * 256
        # 512 elements, padding included: a page each for masters, moments and gradients
        assert elements == 512
        assert optimizer.engine.ledger.bytes(Tier.HOST) == 3 * 4096


def test_nothing_is_trained():
    model = mlp().requires_grad_(False)
    with pytest.raises(UnsupportedError, match="is a trainable one of the model's"):
        offload_with(model, adamw(model), options=EngineOptions(device="cpu"))


class Tied(nn.Module):
    """An embedding whose weight is the output layer's too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embed(x))))


@pytest.mark.parametrize("unit_elements", [None, 1])
def test_tied_weights_are_one_parameter(unit_elements):
    def _loop(model, optimizer):
        for step in range(5):
            ids = torch.arange(7).roll(step)
            nn.functional.cross_entropy(model(ids), ids).backward()
            optimizer.step()
            optimizer.zero_grad()

    plain, model = Tied(), Tied()
    _loop(plain, adamw(plain))
    options = EngineOptions(device="cpu", unit_elements=unit_elements)
    with offloaded(model, options) as optimizer:
        _loop(model, optimizer)
        assert close(weights(model), weights(plain))
        assert model.head.weight is model.embed.weight
        names = [r.slot.names for r in optimizer.engine.collector.records]
        assert ("embed.weight", "head.weight") in names


def test_parameters_over_the_same_memory_are_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(UnsupportedError, match=r"0\.weight and 1\.weight share memory"):
        offload_with(model, adamw(model), options=CPU)


class Branches(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
        self.which = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[self.which](x)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("place", ["host", "resident", "streamed"])
def test_absent_gradients_are_skipped(place, set_to_none):
    def _loop(model, optimizer):
        for step, x in enumerate(batches(7)):
            model.which = int(step in {0, 3, 4})
            (model(x) - 1).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    plain, model = Branches(), Branches()
    reference = adamw(plain)
    _loop(plain, reference)
    with offloaded(model, PLACES[place]) as optimizer:
        _loop(model, optimizer)
        assert close(weights(model), weights(plain))
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert optimizer.state[mine]["step"] == reference.state[theirs]["step"]


class Adapted(nn.Module):
    """A frozen bf16 base with fp32 low-rank adapters and an fp32 norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(8, 8).bfloat16().requires_grad_(False)
        self.tuned = nn.Linear(8, 8).bfloat16()
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.up(self.down(x.float()))
        return self.norm(self.base(x.bfloat16()).float() + self.tuned(x.bfloat16()).float() + low)


@pytest.mark.parametrize("place", ["resident", "streamed", "whole"])
def test_each_parameter_keeps_its_dtype(place):
    def _train(options):
        model = Adapted()
        dtypes = [p.dtype for p in model.parameters()]
        with offloaded(model, options) as optimizer:
            run(model, optimizer, steps=3, features=8, micro=2)
            assert [p.dtype for p in model.parameters()] == dtypes
            assert len(optimizer.engine.units[0].parts) == 2
            return weights(model)

    assert same(_train(CPU), _train(PLACES[place]))
    before = Adapted().state_dict()
    after = _train(CPU)
    assert all(not torch.equal(before[n], after[n]) for n in after if not n.startswith("base"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_foreign_dtypes_are_refused_by_name(dtype):
    model = mlp()
    model.extra = nn.Parameter(torch.zeros(2, dtype=dtype))
    with pytest.raises(UnsupportedError, match="extra"):
        offload_with(model, torch.optim.AdamW(model.parameters()), options=CPU)


def test_freezing_and_unfreezing_while_training():
    def _loop(model, optimizer):
        for step in range(6):
            model[0].requires_grad_(step not in {2, 3})
            run(model, optimizer, steps=1)

    plain, model = mlp(), mlp()
    _loop(plain, adamw(plain))
    with offloaded(model) as optimizer:
        _loop(model, optimizer)
        assert close(weights(model), weights(plain))


def test_unfreezing_what_was_frozen_at_first_is_refused():
    model = mlp()
    model[0].requires_grad_(False)
    with offloaded(model) as optimizer:
        run(model, optimizer, steps=2)
        model[0].requires_grad_(True)
        before = weights(model)
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(UnsupportedError, match="frozen"):
            optimizer.step()
        assert same(before, weights(model))


@pytest.mark.parametrize(
    "change",
    [
        lambda p: setattr(p, "data", torch.zeros(9, 4)),
        lambda p: setattr(p, "data", p.data.double()),
    ],
    ids=["resized", "converted"],
)
def test_other_forms_are_refused(change):
    model = mlp()
    with offloaded(model) as optimizer:
        run(model, optimizer, steps=1)
        optimizer.synchronize()
        change(model[0].weight)
        for p in model[2].parameters():
            p.grad = torch.ones_like(p)
        with pytest.raises(UnsupportedError, match=r"0\.weight is now"):
            optimizer.step()


def test_converted_model_is_refused_in_backward():
    model = mlp(torch.bfloat16)
    with offloaded(model) as optimizer:
        run(model, optimizer, steps=1)
        optimizer.synchronize()
        model.float()
        with pytest.raises(UnsupportedError, match=r"gradient in torch\.float32"):
            model(torch.ones(2, 4)).sum().backward()


def test_state_outside_the_model():
    """Parameters that no module owns are updated before step() returns."""
    model = mlp()
    temperature = nn.Parameter(torch.tensor(2.0))
    source = torch.optim.AdamW([*model.parameters(), temperature], lr=1e-2)
    with offloaded(model, source=source) as optimizer:
        for x in batches(3):
            (model(x) / temperature).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert temperature.item() != 2.0
        assert optimizer.engine.ledger.bytes(Tier.HOST, Role.OPTIM_STATES) > 0


def test_two_optimizers_over_one_model():
    def _loop(model, first, second):
        for x in batches(3):
            (model(x) - 1).pow(2).sum().backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()

    plain, model = mlp(), mlp()
    _loop(plain, adamw(plain[0]), adamw(plain[2]))
    with (
        offloaded(model, source=adamw(model[0])) as first,
        offloaded(model, source=adamw(model[2])) as second,
    ):
        _loop(model, first, second)
        assert close(weights(model), weights(plain))


@pytest.mark.parametrize("options", [CPU, PLACES["weights_away"]], ids=["here", "away"])
def test_a_second_engine_over_the_same_parameters_is_refused(options):
    model = mlp()
    refused = pytest.raises(UnsupportedError, match=r"parameter 0\.weight is held by .* still open")
    with offloaded(model, options), refused:
        offload_with(model, adamw(model), options=options)
    with offloaded(model) as again:
        run(model, again, steps=1)


@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "frozen"])
def test_a_second_engine_over_frozen_weights_that_come_and_go_is_refused(is_trained):
    away, model = PLACES["weights_away"], mlp()
    model[2].requires_grad_(requires_grad=False)
    top = nn.Sequential(model[2], nn.Linear(3, 2))
    with offloaded(model, away, source=adamw(model[0])) as first:
        model[2].requires_grad_(is_trained)
        with pytest.raises(UnsupportedError, match=r"parameter 0\.weight is held by .* still open"):
            offload_with(top, adamw(top[1] if not is_trained else top), options=away)
        run(model, first, steps=1)
    with offloaded(top, away):
        assert not any(value.isnan().any() for value in top.state_dict().values())
