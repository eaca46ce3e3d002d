"""Weights that the user loads on several ranks with his own code; see test_user_loads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import forebay
from distributed.saved_runs import OFFLOADS, Run, engine_of, go_on, masters, state
from forebay.errors import CheckpointError


class Owner(nn.Module):
    """Parameters of its own and of children, which share a unit; inside it once more."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(13))
        self.first = nn.Linear(13, 13)
        self.inner = Owner(depth - 1) if depth else None
        self.shift = nn.Parameter(torch.randn(5, 1))
        self.fixed = nn.Linear(13, 13).requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale
        x = x if self.inner is None else self.inner(x)
        return self.fixed(torch.tanh(x)) + self.shift.sum()


def _owner_engine(stage: int, offload: str, sharers: int = -1) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "mics_shard_size": sharers, **OFFLOADS[offload]},
    }
    engine, *_ = forebay.initialize(model=Owner(), config=config)
    return engine


def _train(engine: Any) -> None:
    rows = torch.randn(2, 13, generator=torch.Generator().manual_seed(engine.global_rank))
    engine.backward(engine(rows.bfloat16()).float().square().mean())
    engine.step()


def load_state_dict(stage: int, offload: str, inside: str) -> dict[str, bool]:
    """`module.load_state_dict` between steps: on every rank, or in a window on rank 0."""
    torch.manual_seed(1)
    given = {name: value.bfloat16() for name, value in Owner().state_dict().items()}
    with _owner_engine(stage, offload) as engine:
        _train(engine)
        if inside == "window":
            with forebay.zero.GatheredParameters(engine.module, modifier_rank=0):
                if engine.global_rank == 0:
                    engine.module.load_state_dict(given)
        else:
            engine.module.load_state_dict(given)
        found, checks = engine.module.state_dict(), {}
        for name, value in given.items():
            checks[name] = bool(torch.equal(found[name].cpu(), value))
        for name, value in masters(engine).items():
            if name in given:
                checks[f"master {name}"] = bool(torch.equal(value.cpu(), given[name].float()))
        _train(engine)
        after = engine.module.state_dict()["scale"].cpu()
        checks["goes on"] = not torch.equal(after, given["scale"])
        return checks


def _load(engine: Any) -> None:
    engine.load_state_dict(engine.state_dict())
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())


def _look(engine: Any) -> None:
    with forebay.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=1):
        pass


_NO_CHANGE: dict[str, Any] = {"load": _load, "window": _look}


def change_nothing(runs: list[Run], by: str) -> list[bool]:
    """Each run twice: as if nobody did anything, and with all that is there taken for new."""
    same = []
    for run in runs:
        found = []
        for acts in (False, True):
            with engine_of(run) as engine:
                losses = go_on(engine, 0, 4)
                if acts:
                    _NO_CHANGE[by](engine)
                found.append((losses + go_on(engine, 4, 8), state(engine)))
        same.append(found[0] == found[1])
    return same


def write_past_autograd(stage: int) -> list[bool]:
    """A window in which one rank writes through `p.data`, which leaves no trace on it."""
    with _owner_engine(stage, "cpu") as engine:
        _train(engine)
        window = forebay.zero.GatheredParameters(engine.module, modifier_rank=0)
        with window:
            if engine.global_rank == 0:
                engine.module.first.weight.data.fill_(3.0)
        after = masters(engine)
        return [bool((after["first.weight"] == 3).all()), not bool((after["shift"] == 3).any())]


def load_on_one_rank(modifier: int, sharers: int) -> dict[str, bool]:
    """What one rank writes in a window is on all of them, whatever copy of the state they hold."""
    with _owner_engine(3, "none", sharers) as engine:
        _train(engine)
        window = forebay.zero.GatheredParameters(engine.module, modifier_rank=modifier)
        with window, torch.no_grad():
            for param in engine.module.parameters():
                param.fill_(engine.global_rank + 1)
        found = engine.module.state_dict()
        return {name: bool((value == modifier + 1).all()) for name, value in found.items()}


def _by_parameter(*, src: dict[str, torch.Tensor], dst: Any) -> None:
    with torch.no_grad():
        dst.first.weight.copy_(src["first.weight"])
        dst.first.bias.fill_(3.0)
        dst.fixed.bias.fill_(4.0)
        dst.shift.copy_(src["shift"])


def _by_state_dict(*, src: dict[str, torch.Tensor], dst: Any) -> None:
    some = {name: value for name, value in src.items() if name != "fixed.bias"}
    some["first.bias"] = torch.full_like(some["first.bias"], 3.0)
    some["fixed.bias"] = torch.full_like(src["fixed.bias"], 4.0)
    dst.load_state_dict(some)


def _by_nobody(**_given: Any) -> None:
    if torch.distributed.get_rank() == 1:
        raise ValueError("not this one")


_FUNCTIONS = {"parameter": _by_parameter, "state dict": _by_state_dict}


def load_with(folder: str, run: Run, by: str) -> dict[str, bool]:
    """Save, and load in another engine with the user's function."""
    with engine_of(run) as engine:
        go_on(engine, 0, 2)
        engine.save_checkpoint(folder)
        want, weights = masters(engine), dict(engine.module.state_dict())
    with engine_of(run, seed=3) as engine:
        go_on(engine, 4, 5)
        engine.load_checkpoint(folder, custom_load_fn=_FUNCTIONS[by])
        found, now = masters(engine), engine.module.state_dict()
        checks = {
            name: bool(torch.equal(value, found[name]))
            for name, value in want.items()
            if name != "first.bias"
        }
        for name, value in weights.items():
            if name not in ("first.bias", "fixed.bias"):
                checks[f"weight {name}"] = bool(torch.equal(value.cpu(), now[name].cpu()))
        for name, value in (("first.bias", 3.0), ("fixed.bias", 4.0)):
            checks[f"weight {name}"] = bool((now[name] == value).all())
        checks["first.bias"] = bool((found["first.bias"] == 3.0).all())
        go_on(engine, 2, 3)
        said = ""
        try:
            engine.load_checkpoint(folder, custom_load_fn=_by_nobody)
        except (CheckpointError, ValueError) as error:
            said = str(error)
        checks[said] = "not this one" in said
        return checks
