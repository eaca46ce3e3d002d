"""Every pair of places for state and weights: the same bits, or what to write instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import forebay
from forebay import ConfigError

_PLACES = ("none", "cpu", "nvme")
_PRECISIONS = ("fp32", "bf16", "fp16")


def _weights(state, weights, precision, folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3000), nn.Tanh(), nn.Linear(3000, 5))
    optimizer = {"device": state}
    if state == "nvme":
        optimizer["nvme_path"] = str(folder)
    config = {
        "train_batch_size": 3,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": optimizer,
            "offload_param": {"device": weights, "max_in_cpu": 0, "nvme_path": str(folder)},
        },
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    engine = forebay.initialize(model=model, config=config)[0]
    dtype = next(iter(model.parameters())).dtype
    for number in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number)).to(dtype)
        engine.backward((engine(x).float() - 1.0).pow(2).mean())
        engine.step()
    engine.eval()
    with torch.no_grad():
        output = engine(torch.ones(2, 4, dtype=dtype))
    found = [output, *(value.clone() for value in engine.module.state_dict().values())]
    engine.close()
    return found


@pytest.mark.parametrize("precision", _PRECISIONS)
def test_every_pair_of_places_trains_the_same_bits_or_is_refused_by_name(precision, tmp_path):
    expected = _weights("none", "none", precision, tmp_path)
    for state in _PLACES:
        for weights in _PLACES:
            if state == "none" and weights != "none":
                with pytest.raises(
                    ConfigError, match="needs optimizer state off the device"
                ) as told:
                    _weights(state, weights, precision, tmp_path)
                assert f'write "offload_optimizer": {{"device": "{weights}"' in told.value.hint
                continue
            found = _weights(state, weights, precision, tmp_path)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), (
                state,
                weights,
            )
    assert list(tmp_path.iterdir()) == []
