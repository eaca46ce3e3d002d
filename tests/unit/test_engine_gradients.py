"""`p.grad` is the truth: reads are exact or raise, writes act or raise, nothing is lost."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from forebay import GradientError, UnsupportedError
from forebay.utils import safe_get_full_grad, safe_set_full_grad
from unit.engine_cases import (
    CPU,
    PLACES,
    adamw,
    batches,
    check_as_plain,
    close,
    loss_of,
    mlp,
    offloaded,
    run,
    same,
    trained_as_plain,
    weights,
)


@pytest.fixture(params=["host", "resident", "streamed"])
def pair(request):
    """A plain model and one in forebay's hands, both with the gradient of one backward."""
    plain, model = mlp(), mlp()
    x = batches(1)[0]
    loss_of(plain, x).backward()
    with offloaded(model, PLACES[request.param]) as optimizer:
        loss_of(model, x).backward()
        yield plain, model, optimizer


READS = {
    "norm": lambda g: g.norm(),
    "data": lambda g: g.data.norm(),
    "detach": lambda g: g.detach().abs().sum(),
    "clone": lambda g: g.clone(),
    "isfinite": lambda g: torch.isfinite(g).all(),
    "isnan": lambda g: g.isnan().any(),
    "cpu": lambda g: g.cpu().max(),
    "double": lambda g: g.double().sum(),
    "flat": lambda g: g.view(-1).clone(),
    "row": lambda g: g[0].clone(),
    "columns": lambda g: g[..., 1:].sum(),
    "transposed": lambda g: g.T.clone(),
    "split": lambda g: g.chunk(2)[1].clone(),
    "view_of_view": lambda g: g.reshape(-1)[2:][0] + 0,
    "sum": lambda g: g.sum().item(),
    "numpy": lambda g: torch.from_numpy(g.numpy()),
    "list": lambda g: torch.tensor(g.tolist()),
    "deepcopy": copy.deepcopy,
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "binary": lambda g: 2 * g + g / 3,
    "compare": lambda g: (g > 0).sum(),
    "stack": lambda g: torch.stack([g, g]),
    "foreach_norm": lambda g: torch.stack(torch._foreach_norm([g, g])),
    "total_norm": lambda g: torch.nn.utils.get_total_norm([g]),
}


@pytest.mark.parametrize("read", READS)
def test_reads_are_exact(pair, read):
    plain, model, _ = pair
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if theirs.ndim > 1:
            a, b = READS[read](mine.grad), READS[read](theirs.grad)
            assert a == b if isinstance(a, float) else torch.equal(a, b)


WRITES = {
    "mul_": lambda g: g.mul_(2),
    "add_": lambda g: g.add_(torch.ones_like(g)),
    "iadd": lambda g: g.__iadd__(1.0),
    "alpha": lambda g: g.add_(torch.ones(g.shape), alpha=2),
    "data": lambda g: g.data.mul_(2),
    "item": lambda g: g.__setitem__(0, 0.0),
    "mask": lambda g: g.__setitem__(torch.ones(g.shape, dtype=torch.bool), 0.0),
    "view": lambda g: g.view(-1).mul_(2),
    "row": lambda g: g[0].zero_(),
    "slice_add": lambda g: g[:1].add_(torch.ones(1, *g.shape[1:])),
    "clamp_": lambda g: g.clamp_(-1, 1),
    "copy_": lambda g: g.copy_(torch.zeros(g.shape)),
    "nan_to_num_": torch.nan_to_num_,
    "out": lambda g: torch.mul(torch.ones(g.shape), 2, out=g),
    "foreach": lambda g: torch._foreach_mul_([g], 2.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_raise_with_a_way_out(pair, write):
    plain, model, optimizer = pair
    with pytest.raises(GradientError, match="hint: ") as error:
        WRITES[write](model[0].weight.grad)
    assert "0.weight" in str(error.value)
    reference = adamw(plain)
    reference.step()
    optimizer.step()
    assert close(weights(model), weights(plain))


def test_torch_clipping_raises_and_ours_clips(pair):
    plain, model, optimizer = pair
    with pytest.raises(GradientError, match="clip_norm"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(GradientError, match="clip_norm"):
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    reference = adamw(plain)
    reference.step()
    optimizer.clip_grad_norm_(0.01)
    optimizer.step()
    assert optimizer.last_grad_norm == pytest.approx(norm.item(), rel=1e-6)
    assert close(weights(model), weights(plain))


def test_unscaling_raises_with_a_way_out(pair):
    _, model, optimizer = pair
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(GradientError, match="hint: "):
        scaler.unscale_(optimizer)
    assert torch.isfinite(model[0].weight.grad).all()


def test_gradients_may_be_changed_in_hooks():
    def _train(model, optimizer):
        for p in model.parameters():
            p.register_hook(lambda grad: grad * 0.5)
        run(model, optimizer)

    check_as_plain(_train)


def test_hook_that_adds_behind_our_back():
    model = mlp()
    with offloaded(model) as optimizer:

        def _add(param):
            param.grad.add_(torch.ones_like(param))

        model[0].weight.register_post_accumulate_grad_hook(_add)
        loss_of(model, batches(1)[0]).backward()
        with pytest.raises(GradientError, match="after its gradient had left"):
            optimizer.step()


@pytest.mark.parametrize("place", ["host", "resident", "streamed"])
def test_gradient_set_to_none_is_discarded(place):
    def _loop(model, optimizer):
        for index, x in enumerate(batches(3)):
            loss_of(model, x).backward()
            if index == 1:
                model[0].weight.grad = None
            optimizer.step()
            optimizer.zero_grad()

    with trained_as_plain(_loop, PLACES[place]) as (model, optimizer):
        assert optimizer.state[model[0].weight]["step"] == 2


@pytest.mark.parametrize("place", ["host", "resident", "streamed"])
def test_users_own_tensors_count_and_are_not_kept(place):
    """One buffer serves every step: it is overwritten while its copy is on its way."""
    plain, model = mlp(), mlp()
    reference = adamw(plain)
    with offloaded(model, PLACES[place]) as optimizer:
        buffers = [torch.empty_like(p) for p in model.parameters()]
        for x in batches(4):
            loss_of(plain, x).backward()
            for p, q, buffer in zip(model.parameters(), plain.parameters(), buffers, strict=True):
                buffer.copy_(q.grad)
                p.grad = buffer
            reference.step()
            reference.zero_grad()
            optimizer.step()
            for buffer in buffers:
                buffer.fill_(float("nan"))
            optimizer.zero_grad()
        assert close(weights(model), weights(plain))


def test_backward_adds_to_the_users_tensor():
    def _loop(model, optimizer, overwritten):
        for x in batches(3):
            start = [torch.full_like(p, 0.1) for p in model.parameters()]
            for p, value in zip(model.parameters(), start, strict=True):
                p.grad = value
            loss_of(model, x).backward()
            for value in start if overwritten else ():
                value.fill_(7.0)
            optimizer.step()
            optimizer.zero_grad()

    plain, model = mlp(), mlp()
    _loop(plain, adamw(plain), overwritten=False)
    with offloaded(model) as optimizer:
        _loop(model, optimizer, overwritten=True)
        assert close(weights(model), weights(plain))


def test_tensor_of_another_form_is_refused():
    model = mlp(torch.bfloat16)
    with offloaded(model) as optimizer:
        param = model[0].weight
        if hasattr(param, "grad_dtype"):  # torch 2.9 and later
            param.grad_dtype = torch.float32
            with pytest.raises(UnsupportedError, match=r"gradient in torch\.float32"):
                loss_of(model, batches(1, torch.bfloat16)[0]).backward()
            optimizer.zero_grad()


class _SharedBuffer(torch.autograd.Function):
    """A custom backward that writes every gradient into one buffer, as some fused kernels do."""

    buffer: torch.Tensor

    @staticmethod
    def forward(ctx, weight, factor):
        ctx.factor = factor
        return weight * factor

    @staticmethod
    def backward(ctx, grad):
        buffer = _SharedBuffer.buffer
        torch.mul(grad, ctx.factor, out=buffer)
        return buffer, None


@pytest.mark.parametrize("declared", [1, 4])
@pytest.mark.parametrize("place", ["host", "resident"])
def test_gradients_in_a_reused_buffer(place, declared):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 300))

        def forward(self, factor):
            return _SharedBuffer.apply(self.weight, factor).pow(2).sum()

    _SharedBuffer.buffer = torch.empty(300)

    def _loop(model, optimizer):
        for step in range(3):
            for micro in range(4):
                model(1.0 + step + micro).backward()
            optimizer.step()
            optimizer.zero_grad()

    plain, model = Scaled(), Scaled()
    _loop(plain, adamw(plain))
    with offloaded(model, replace(PLACES[place], backwards=declared)) as optimizer:
        _loop(model, optimizer)
        assert close(weights(model), weights(plain))


def test_kept_stand_ins_do_not_show_a_later_gradient():
    """`g1 = p.grad; p.grad = None; backward(); g2 = p.grad`: g1 must not become g2."""
    model = mlp()
    with offloaded(model) as optimizer:
        param = model[0].weight
        loss_of(model, batches(1)[0]).backward()
        kept, copied = param.grad, param.grad.clone()
        optimizer.zero_grad()
        loss_of(model, batches(2)[1]).backward()
        assert not torch.equal(param.grad.clone(), copied)
        with pytest.raises(GradientError, match="clone"):
            kept.norm()
        with pytest.raises(GradientError, match="clone"):
            kept.zero_()
        param.grad = kept
        with pytest.raises(GradientError, match="another window"):
            optimizer.step()
        param.grad = copied
        optimizer.step()


def test_reads_after_the_step_raise():
    model = mlp()
    with offloaded(model) as optimizer:
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
        with pytest.raises(GradientError, match="last_grad_norm"):
            model[0].weight.grad.norm()
        optimizer.zero_grad()
        assert model[0].weight.grad is None


@pytest.mark.parametrize("place", ["host", "resident", "streamed"])
def test_reads_between_backwards(place):
    plain, model = mlp(), mlp()
    with offloaded(model, PLACES[place]) as optimizer:
        for window in range(2):
            for x in batches(3):
                loss_of(plain, x).backward()
                loss_of(model, x).backward()
                for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                    assert torch.allclose(p.grad.clone(), q.grad, rtol=1e-6), window
            optimizer.step()
            plain.zero_grad()
            optimizer.zero_grad()
            plain.load_state_dict(model.state_dict())


def test_sixteen_bit_sums_are_not_rounded_behind_the_users_back():
    model = mlp(torch.bfloat16)
    with offloaded(model):
        xs = batches(2, torch.bfloat16)
        loss_of(model, xs[0]).backward()
        assert model[0].weight.grad.clone().dtype is torch.bfloat16
        loss_of(model, xs[1]).backward()
        with pytest.raises(GradientError, match="safe_get_full_grad"):
            model[0].weight.grad.norm()
        assert safe_get_full_grad(model[0].weight).dtype is torch.float32


@pytest.mark.parametrize("place", ["host", "resident"])
def test_small_gradients_survive_512_micro_batches(place):
    """1 once and 2**-10 another 511 times: bf16 sums would stay at 1."""
    weight = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    model = nn.ParameterList([weight])
    with offloaded(model, PLACES[place]) as optimizer:
        for window in range(2):  # learned in the first, planned in the second
            for micro in range(512):
                (weight * (1.0 if micro == 0 else 2.0**-10)).sum().backward()
            total = safe_get_full_grad(weight)
            assert torch.equal(total.cpu(), torch.full((5,), 1.0 + 511 * 2.0**-10)), window
            assert len(optimizer.engine.lanes._held) < 256  # addends do not pile up
            optimizer.step()
            optimizer.zero_grad()


def test_gradient_set_through_the_helper():
    model = mlp()
    with offloaded(model) as optimizer:
        run(model, optimizer, steps=1)
        assert safe_get_full_grad(model[0].weight) is None
        loss_of(model, batches(1)[0]).backward()
        safe_set_full_grad(model[0].weight, torch.full((7, 4), 3.0))
        assert torch.equal(safe_get_full_grad(model[0].weight), torch.full((7, 4), 3.0))
        optimizer.step()


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    with offloaded(model) as optimizer:
        before = weights(model)
        with pytest.raises(UnsupportedError, match="sparse=False"):
            model(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(GradientError):
            optimizer.step()
        assert same(before, weights(model))


def test_closing_leaves_no_stand_in():
    model = mlp()
    with offloaded(model, CPU):
        loss_of(model, batches(1)[0]).backward()
    assert all(p.grad is None for p in model.parameters())
    loss_of(model, batches(1)[0]).backward()
    assert type(model[0].weight.grad) is torch.Tensor
