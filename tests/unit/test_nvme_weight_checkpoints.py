"""Checkpoints of models whose weights are in files, and loading them anywhere else."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import forebay

_OFFLOAD = {
    "none": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "nvme": {
        "offload_optimizer": {"device": "nvme", "buffer_size": 65536},
        "offload_param": {"device": "nvme", "max_in_cpu": 0, "buffer_size": 65536},
    },
}


def _engine(kind, folder, *, precision="bf16", seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 20_000), nn.Tanh(), nn.Linear(20_000, 5))
    zero = {"stage": 3, **{key: dict(value) for key, value in _OFFLOAD[kind].items()}}
    if kind == "nvme":
        zero["offload_optimizer"]["nvme_path"] = str(folder)
    config = {
        "train_batch_size": 3,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return forebay.initialize(model=model, config=config)[0]


def _train(engine, numbers):
    dtype = next(iter(engine.module.parameters())).dtype
    for number in numbers:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number)).to(dtype)
        engine.backward((engine(x).float() - 1.0).pow(2).mean())
        engine.step()


def _weights(engine):
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def _equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.parametrize(("first", "second"), [("nvme", "cpu"), ("none", "nvme"), ("nvme", "nvme")])
def test_training_goes_on_elsewhere_with_the_same_bits(first, second, tmp_path):
    whole = _engine("none", tmp_path)
    _train(whole, range(5))
    begun = _engine(first, tmp_path)
    _train(begun, range(2))
    begun.save_checkpoint(str(tmp_path / "saved"))
    begun.close()
    rest = _engine(second, tmp_path, seed=9)
    rest.load_checkpoint(str(tmp_path / "saved"))
    _train(rest, range(2, 5))
    assert _equal(_weights(whole), _weights(rest))
    whole.close()
    rest.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_sixteen_bit_weights_are_streamed_from_files(precision, tmp_path):
    files = []
    for kind in ("none", "nvme"):
        engine = _engine(kind, tmp_path, precision=precision)
        _train(engine, range(2))
        engine.save_16bit_model(str(tmp_path / kind), "model.safetensors")
        engine.close()
        files.append(load_file(tmp_path / kind / "model.safetensors"))
    assert _equal(*files)


def test_full_values_are_read_and_set(tmp_path):
    found = []
    for kind in ("none", "nvme"):
        engine = _engine(kind, tmp_path)
        _train(engine, range(2))
        weight = engine.module[2].weight
        forebay.utils.safe_set_full_fp32_param(weight, torch.full((5, 20_000), 0.3))
        _train(engine, range(2, 4))
        found.append((forebay.utils.safe_get_full_fp32_param(weight), _weights(engine)))
        engine.close()
    assert torch.equal(found[0][0], found[1][0])
    assert _equal(found[0][1], found[1][1])
