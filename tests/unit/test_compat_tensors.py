"""`safe_get_*` and `safe_set_*`: whole fp32 values behind a parameter, wherever they live."""

from __future__ import annotations

import pytest
import torch

from compat_cases import batches, engine_of, loss_of, small, train
from forebay import utils
from forebay.engine import EngineOptions, offload_with
from forebay.errors import ConfigError, UnsupportedError
from forebay.plan import SixteenBitMaster
from forebay.zero import GatheredParameters

PLACES = ["cpu", "none", "weights"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _engine(place: str, dtype: torch.dtype, **config):
    zero: dict = {"offload_optimizer": {"device": "none" if place == "none" else "cpu"}}
    if place == "weights":
        zero |= {"stage": 3, "offload_param": {"device": "cpu"}, "max_live_parameters": 0}
    zero = {"zero_optimization": zero}
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 6}}
    own = fp16 if dtype is torch.float16 else {}
    return engine_of(zero | own | config, model=small(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_masters_and_states(place, dtype):
    with _engine(place, dtype) as engine:
        train(engine, 3)
        for param in engine.module.parameters():
            master = utils.safe_get_full_fp32_param(param)
            assert master.dtype is torch.float32
            assert master.shape == param.shape
            # half an ulp of the working dtype away at most: the weight is the rounded master
            bound = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
            with GatheredParameters(param):
                weight = param.detach().clone()
            error = (weight.float() - master.to(param.device)).abs()
            assert bool((error <= bound * master.to(param.device).abs()).all())
            first = utils.safe_get_full_optimizer_state(param, "exp_avg")
            second = utils.safe_get_full_optimizer_state(param, "exp_avg_sq")
            assert first.shape == second.shape == param.shape
            assert bool((second >= 0).all())
            assert bool((second > 0).any())
            first.zero_()  # a copy: nothing of the engine's
            again = utils.safe_get_full_optimizer_state(param, "exp_avg")
            assert bool((again != 0).any())
            assert torch.equal(utils.safe_get_local_fp32_param(param), master.flatten())
            local = utils.safe_get_local_optimizer_state(param, "exp_avg_sq")
            assert torch.equal(local, second.flatten())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_gradients_have_no_loss_scale_in_them(place, dtype):
    with _engine(place, dtype, gradient_accumulation_steps=2) as engine:
        plain = small(dtype)
        param, own = engine.module[0].weight, plain[0].weight
        assert utils.safe_get_full_grad(param) is None
        for x in batches(2):
            engine.backward(loss_of(engine, x))
            (loss_of(plain, x) / 2).backward()
            found = utils.safe_get_full_grad(param)
            assert found.dtype is torch.float32
            # sums: ours in fp32, torch's in the working dtype; and fp16 rounds scaled addends
            ulps = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-8}
            size = own.grad.float().abs().max()
            assert bool(((found.cpu() - own.grad.float()).abs() <= ulps[dtype] * size).all())
            assert torch.equal(utils.safe_get_local_grad(param), found.flatten())
            engine.step()
        assert utils.safe_get_full_grad(param) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_values_that_were_set_are_trained_on(place, dtype):
    with _engine(place, dtype) as engine, _engine(place, dtype) as other:
        train(engine, 2)
        pairs = list(zip(engine.module.parameters(), other.module.parameters(), strict=True))
        for source, target in pairs:
            utils.safe_set_full_fp32_param(target, utils.safe_get_full_fp32_param(source))
            for key in ("exp_avg", "exp_avg_sq"):
                value = utils.safe_get_local_optimizer_state(source, key)
                utils.safe_set_local_optimizer_state(target, value, key)
        for source, target in pairs:
            with GatheredParameters([source, target]):
                assert torch.equal(source, target)
            a, b = (utils.safe_get_full_fp32_param(p) for p in (source, target))
            assert torch.equal(a, b)
        train(other, 2)
        for param in other.module.parameters():
            doubled = 2.0 * utils.safe_get_full_fp32_param(param)
            utils.safe_set_local_fp32_param(param, doubled.flatten())
            assert torch.equal(utils.safe_get_full_fp32_param(param), doubled)


def test_a_gradient_that_was_set_is_the_one_that_is_used():
    with engine_of({"gradient_clipping": 0.0}) as engine:
        for x in batches(1):
            engine.backward(loss_of(engine, x))
        for param in engine.module.parameters():
            utils.safe_set_full_grad(param, torch.zeros_like(param))
        utils.safe_set_local_grad(engine.module[2].bias, torch.tensor([3.0, 0.0, 4.0]))
        engine.step()
        assert engine.get_global_grad_norm() == 5.0


def test_refusals():
    stranger = torch.nn.Parameter(torch.ones(2))
    with engine_of() as engine:
        param = engine.module[0].weight
        with pytest.raises(UnsupportedError, match="not trained by an open engine"):
            utils.safe_get_full_fp32_param(stranger)
        with pytest.raises(ConfigError, match="'momentum' does not exist"):
            utils.safe_get_full_optimizer_state(param, "momentum")
        with pytest.raises(ConfigError, match="shape"):
            utils.safe_set_full_fp32_param(param, torch.ones(2))
        with pytest.raises(ConfigError, match="2 elements, this rank's slice 91"):
            utils.safe_set_local_fp32_param(param, torch.ones(2))
    with pytest.raises(UnsupportedError):
        utils.safe_get_full_fp32_param(param)


def _half(master: SixteenBitMaster):
    model = small(torch.bfloat16)
    options = EngineOptions(device="cpu", bf16_master=master)
    return offload_with(model, torch.optim.AdamW(model.parameters(), lr=1e-3), options=options)


def _step(model, optimizer) -> None:
    for x in batches(1):
        loss_of(model, x).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("first", ["weights", "states"])
@pytest.mark.parametrize("into", SixteenBitMaster)
@pytest.mark.parametrize("saved", SixteenBitMaster)
def test_masters_of_state_dicts_are_read_before_the_next_step(saved, into, first):
    """Whichever was loaded first; reading settles nothing, and what is set then stays."""
    left, right = (_half(master) for master in (saved, into))
    for _ in range(3):
        _step(*left)
    expected = [utils.safe_get_full_fp32_param(p) for p in left[0].parameters()]
    loads = [lambda: right[0].load_state_dict(left[0].state_dict())]
    loads.insert(first == "weights", lambda: right[1].load_state_dict(left[1].state_dict()))
    params = list(right[0].parameters())
    for load in loads:
        load()
        found = [utils.safe_get_full_fp32_param(p) for p in params]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(utils.safe_get_local_fp32_param(params[0]), expected[0].reshape(-1))
    third = _half(saved)
    third[0].load_state_dict(right[0].state_dict())
    third[1].load_state_dict(right[1].state_dict())
    found = [utils.safe_get_full_fp32_param(p) for p in third[0].parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    value = expected[0] * 1.001
    utils.safe_set_full_fp32_param(params[0], value)
    for group in right[1].param_groups:
        group["lr"] = 0.0
    _step(*right)
    assert torch.equal(utils.safe_get_full_fp32_param(params[0]), value)
    for _, optimizer in (left, right, third):
        optimizer.close()
