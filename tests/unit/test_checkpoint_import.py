"""A plain torch training state, into an engine."""

from __future__ import annotations

import pytest
import torch

from checkpoint_cases import PLACES, Layout, Net, engine_of, numbers, run
from forebay.errors import CheckpointError


def _plain(steps=3):
    """A few updates of plain torch in float32, and the state of both."""
    torch.manual_seed(7)
    model = Net(37)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, "lr": 2e-3},
        ],
        lr=2e-2,
    )
    for step in range(steps):
        x = torch.randn(5, 13, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_moments_steps_and_groups(place, dtype):
    model, optimizer = _plain()
    with engine_of(Layout(place=place, dtype=dtype)) as engine:
        run(engine, 0, 1)
        engine.import_torch_state(model.state_dict(), optimizer.state_dict())
        found = numbers(engine)
        for name, param in model.named_parameters():
            if not param.requires_grad:
                continue
            assert torch.equal(found[f"master {name}"], param.data), name
            state = optimizer.state[param]
            assert torch.equal(found[f"exp_avg {name}"], state["exp_avg"])
            assert torch.equal(found[f"exp_avg_sq {name}"], state["exp_avg_sq"])
            assert found[f"step {name}"] == 3
            torch.testing.assert_close(
                found[f"weight {name}"], param.data.to(dtype), rtol=0.01, atol=1e-3
            )
        assert engine.get_lr() == [2e-2, 2e-3]
        run(engine, 1, 3)
        # a loss scale that looks for its value skips steps
        assert dtype is torch.float16 or numbers(engine)["step scalar"] == 5


def test_another_model_or_optimizer_is_refused():
    model, optimizer = _plain(1)
    with engine_of(Layout()) as engine:
        state = model.state_dict()
        before = numbers(engine)
        with pytest.raises(CheckpointError, match=r"1 tensors are missing .* scalar"):
            engine.import_torch_state({k: v for k, v in state.items() if k != "scalar"})
        with pytest.raises(CheckpointError, match=r"last\.bias has the shape"):
            engine.import_torch_state({**state, "last.bias": torch.ones(4)})
        with pytest.raises(CheckpointError, match="groups of"):
            other = optimizer.state_dict()
            other["param_groups"].pop()
            engine.import_torch_state(state, other)
        after = numbers(engine)
        assert torch.equal(before["master last.bias"], after["master last.bias"])
