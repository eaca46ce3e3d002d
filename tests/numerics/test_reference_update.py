"""The torch reference: exact operation by operation, and as close to torch as arithmetic allows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given as any_of
from hypothesis import settings
from hypothesis import strategies as st

from forebay.optim.master import join, split
from forebay.optim.reference import AdamState, round_to, update_
from forebay.optim.rule import AdamRule, DecayMode, WeightDecay
from numerics.bounds import Settings, State, U, given, ours, torchs

FORMATS = [torch.float32, torch.bfloat16, torch.float16]
GROUP = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
HYPERS = {
    "none": AdamRule(WeightDecay.L2).capture({**GROUP, "weight_decay": 0.0}, 1),
    "l2": AdamRule(WeightDecay.L2).capture(GROUP, 2),
    "decoupled": AdamRule(WeightDecay.DECOUPLED).capture(GROUP, 50),
}


def any_bits(elements: int, seed: int) -> torch.Tensor:
    """Half of it ordinary numbers, half any bit pattern: subnormals, infinities, NaN, -0."""
    source = np.random.default_rng(seed)
    wild = source.integers(0, 2**32, elements, dtype=np.uint32).view(np.float32)
    tame = source.standard_normal(elements, dtype=np.float32)
    return torch.from_numpy(np.where(source.random(elements) < 0.5, tame, wild))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bits, except that any NaN equals any other."""
    whole = torch.int32 if left.itemsize == 4 else torch.int16
    nan = left.isnan() & right.isnan()
    return bool((nan | (left.view(whole) == right.view(whole))).all())


def fresh(elements: int, seed: int) -> AdamState:
    return AdamState(
        master=any_bits(elements, seed),
        exp_avg=any_bits(elements, seed + 1),
        exp_avg_sq=any_bits(elements, seed + 2).abs(),
    )


def by_numpy(state: AdamState, grad: torch.Tensor, scale: float, hyper) -> list[np.ndarray]:
    """The formula in numpy, whose float32 operations round correctly one by one."""
    f = np.float32
    p, m, v = (t.numpy().copy() for t in (state.master, state.exp_avg, state.exp_avg_sq))
    with np.errstate(all="ignore"):
        g = grad.float().numpy() * f(scale)
        if hyper.decay_mode is DecayMode.L2:
            g = g + f(hyper.decay) * p
        if hyper.decay_mode is DecayMode.DECOUPLED:
            p = p * f(hyper.decay)
        m = m + f(hyper.one_minus_beta1) * (g - m)
        v = f(hyper.beta2) * v + (f(hyper.one_minus_beta2) * g) * g
        root = np.sqrt(v) / f(hyper.bias_correction2_sqrt)
        p = p - (f(hyper.step_size) * m) / (root + f(hyper.eps))
    return [p, m, v]


@pytest.mark.parametrize("kind", HYPERS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_every_operation_rounds_once(kind, dtype):
    """Subnormals, infinities, NaN and -0 included; a fused or flushed operation shows here."""
    elements = 200_003
    state = fresh(elements, 1)
    grad = any_bits(elements, 4).to(dtype)
    expected = by_numpy(state, grad, 0.37109375, HYPERS[kind])
    update_(state, grad=grad, scale=0.37109375, hyper=HYPERS[kind])
    for got, want in zip((state.master, state.exp_avg, state.exp_avg_sq), expected, strict=True):
        assert same_bits(got, torch.from_numpy(want))


@pytest.mark.parametrize("kind", HYPERS)
def test_split_and_whole_masters_give_the_same_bits(kind):
    whole = fresh(50_001, 7)
    high, low = split(whole.master)
    halves = AdamState(
        master=high, low=low, exp_avg=whole.exp_avg.clone(), exp_avg_sq=whole.exp_avg_sq.clone()
    )
    out = torch.empty(50_001, dtype=torch.bfloat16)
    for step in range(3):
        grad = any_bits(50_001, 20 + step).to(torch.bfloat16)
        update_(whole, grad=grad, scale=1.0, hyper=HYPERS[kind], out=out)
        update_(halves, grad=grad, scale=1.0, hyper=HYPERS[kind])
        assert same_bits(halves.master, out)
        assert same_bits(join(halves.master, low), whole.master)
        assert same_bits(halves.exp_avg, whole.exp_avg)


@pytest.mark.parametrize("dtype", FORMATS)
def test_weights_may_be_written_over_the_gradient(dtype):
    first, second = fresh(999, 3), fresh(999, 3)
    grad = any_bits(999, 6).to(dtype)
    out = torch.empty_like(grad)
    update_(first, grad=grad, scale=0.5, hyper=HYPERS["l2"], out=out)
    update_(second, grad=grad, scale=torch.tensor(0.5), hyper=HYPERS["l2"], out=grad)
    assert same_bits(grad, out)


def test_fp16_weights_round_to_even_overflow_and_keep_subnormals():
    value = torch.tensor([1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11, 65520.0, -1e30, 2.0**-24, -0.0])
    expected = [1.0, 1.0 + 2.0**-9, math.inf, -math.inf, 2.0**-24, -0.0]
    assert round_to(value, torch.float16).tolist() == expected


def test_layouts_are_checked():
    with pytest.raises(TypeError, match=r"this layout has torch\.bfloat16"):
        AdamState(
            master=torch.zeros(1),
            low=torch.zeros(1, dtype=torch.int16),
            exp_avg=torch.zeros(1),
            exp_avg_sq=torch.zeros(1),
        )
    with pytest.raises(TypeError, match="float64"):
        round_to(torch.zeros(1), torch.float64)


def optimizer_of(parameter: torch.nn.Parameter, s: Settings, **options) -> torch.optim.Optimizer:
    cls = torch.optim.AdamW if s.decoupled else torch.optim.Adam
    return cls(
        [parameter],
        lr=s.lr,
        betas=(s.beta1, s.beta2),
        eps=s.eps,
        weight_decay=s.weight_decay,
        foreach=False,
        **options,
    )


def zeros_like_state(start: torch.Tensor) -> State:
    zero = given(torch.zeros_like(start))
    return State(given(start), zero, zero)


def assert_within(got: torch.Tensor, bound, what: str) -> None:
    excess = (got.detach().double() - bound.value).abs() - bound.error
    assert float(excess.max()) <= 0.0, f"{what} leaves its bound by {float(excess.max()):.3g}"


@pytest.mark.parametrize(
    "s",
    [
        Settings(),
        Settings(weight_decay=0.1),
        Settings(weight_decay=0.1, decoupled=False),
        Settings(lr=0.1, beta1=0.3, beta2=0.5, eps=1e-3),
        Settings(beta1=0.0, beta2=0.95, weight_decay=0.01),
    ],
    ids=str,
)
def test_twenty_steps_stay_within_the_derived_bounds(s):
    """Recorded gradients fed to both; see [Note: error model] in `numerics.bounds`."""
    generator = torch.Generator().manual_seed(5)
    n = 20_011
    start = torch.randn(n, generator=generator)
    # Elements whose gradients range from 1e-9 to 1e3, constant over time, so that v is never
    # smaller than its own error.
    size = 10.0 ** (torch.rand(n, generator=generator) * 12 - 9)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = optimizer_of(parameter, s)
    rule = AdamRule.of(optimizer)
    state = AdamState(master=start.clone(), exp_avg=torch.zeros(n), exp_avg_sq=torch.zeros(n))
    bound, torch_bound = zeros_like_state(start), zeros_like_state(start)
    for step in range(1, 21):
        grad = torch.randn(n, generator=generator) * size
        parameter.grad = grad.clone()
        optimizer.step()
        hyper = rule.capture(optimizer.param_groups[0], step)
        update_(state, grad=grad, scale=1.0, hyper=hyper)
        bound, torch_bound = (
            ours(bound, given(grad), step, s),
            torchs(torch_bound, given(grad), step, s),
        )
        theirs = optimizer.state[parameter]
        assert_within(state.master, bound.p, "the weight")
        assert_within(state.exp_avg, bound.m, "the first moment")
        assert_within(state.exp_avg_sq, bound.v, "the second moment")
        assert_within(parameter, torch_bound.p, "torch's weight")
        assert_within(theirs["exp_avg"], torch_bound.m, "torch's first moment")
        assert_within(theirs["exp_avg_sq"], torch_bound.v, "torch's second moment")
    # A bound that grows out of hand would prove nothing. Each of 20 steps rounds the weight once,
    # or three times with decoupled decay (the factor, the product, the difference).
    size = bound.p.value.abs() + 20 * s.lr
    for errors in (bound.p.error, torch_bound.p.error):
        assert float((errors / size).quantile(0.9)) <= 62 * U


@any_of(
    st.integers(1, 5000), st.booleans(), st.integers(0, 2**31), st.sampled_from(list(WeightDecay))
)
@settings(max_examples=200, deadline=None)
def test_one_step_equals_torch_to_a_millionth(elements, matrix, seed, kind):
    """200 random sizes, one- and two-dimensional, tails included."""
    generator = torch.Generator().manual_seed(seed)
    shape = (elements // 7 + 1, 7) if matrix else (elements,)
    s = Settings(weight_decay=0.1, decoupled=kind is WeightDecay.DECOUPLED)
    parameter = torch.nn.Parameter(torch.randn(shape, generator=generator))
    parameter.grad = torch.randn(shape, generator=generator)
    before = parameter.detach().clone()
    state = AdamState(
        master=before.clone(),
        exp_avg=torch.zeros(shape),
        exp_avg_sq=torch.zeros(shape),
    )
    optimizer = optimizer_of(parameter, s)
    hyper = AdamRule.of(optimizer).capture(optimizer.param_groups[0], 1)
    update_(state, grad=parameter.grad, scale=1.0, hyper=hyper)
    optimizer.step()
    # A gradient near epsilon, where the decay cancels it, makes a step of any rounding's size.
    decay = s.weight_decay * before if kind is WeightDecay.L2 else 0.0
    plain = (parameter.grad + decay).abs() > 1e-4
    assert int((~plain).sum()) <= 2 + elements // 500
    torch.testing.assert_close(state.master[plain], parameter.detach()[plain], rtol=1e-6, atol=1e-9)


def test_adam_and_adamw_differ_as_in_torch():
    """One step with decay 0.1: each equals its namesake and not the other."""
    start, grad = torch.full((4,), 2.0), torch.full((4,), 1e-3)
    results = {}
    for kind in WeightDecay:
        s = Settings(lr=0.1, weight_decay=0.1, decoupled=kind is WeightDecay.DECOUPLED)
        parameter = torch.nn.Parameter(start.clone())
        optimizer = optimizer_of(parameter, s)
        state = AdamState(master=start.clone(), exp_avg=torch.zeros(4), exp_avg_sq=torch.zeros(4))
        hyper = AdamRule.of(optimizer).capture(optimizer.param_groups[0], 1)
        update_(state, grad=grad, scale=1.0, hyper=hyper)
        parameter.grad = grad.clone()
        optimizer.step()
        torch.testing.assert_close(state.master, parameter.detach(), rtol=1e-6, atol=0)
        results[kind] = state.master
    assert float((results[WeightDecay.L2] - results[WeightDecay.DECOUPLED]).abs().max()) > 0.01


@pytest.mark.parametrize("kind", WeightDecay)
def test_maximize_is_a_sign_of_the_scale(kind):
    s = Settings(weight_decay=0.1, decoupled=kind is WeightDecay.DECOUPLED)
    generator = torch.Generator().manual_seed(9)
    parameter = torch.nn.Parameter(torch.randn(500, generator=generator))
    optimizer = optimizer_of(parameter, s, maximize=True)
    state = AdamState(
        master=parameter.detach().clone(), exp_avg=torch.zeros(500), exp_avg_sq=torch.zeros(500)
    )
    for step in range(1, 4):
        parameter.grad = torch.randn(500, generator=generator)
        hyper = AdamRule.of(optimizer).capture(optimizer.param_groups[0], step)
        update_(state, grad=parameter.grad, scale=1.0 * hyper.sign, hyper=hyper)
        optimizer.step()
    torch.testing.assert_close(state.master, parameter.detach(), rtol=1e-6, atol=1e-9)
    # Gradients up to 4, a tenth of each, three steps, two roundings each: 3 * 2 * 0.4 * 2^-24.
    torch.testing.assert_close(
        state.exp_avg, optimizer.state[parameter]["exp_avg"], rtol=1e-6, atol=1.5e-7
    )
