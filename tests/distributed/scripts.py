"""What a user's script does on each rank, through `forebay.initialize`."""

from __future__ import annotations

import io
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.distributed_c10d import _world

import forebay
from distributed.training import digest
from forebay.errors import EngineClosedError, RankError, UnsupportedError
from forebay.observe.breakdown import break_down
from forebay.observe.recording import record


def config(stage: int = 2, **more: Any) -> dict[str, Any]:
    """A DeepSpeed configuration."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        **more,
    }


def mlp(width: int = 5) -> nn.Module:
    """Small, in float32."""
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


def samples(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same everywhere."""
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(3, generator=generator), torch.randn(2, generator=generator))
        for _ in range(count)
    ]


def fit(stage: int, accumulation: int) -> dict[str, Any]:
    """Train on a dataset that does not divide by the ranks."""
    torch.manual_seed(1)
    settings = config(stage, gradient_accumulation_steps=accumulation, steps_per_print=1)
    engine, _, loader, _ = forebay.initialize(
        model=mlp(), config=settings, training_data=samples(23)
    )
    seen, norms = [], []
    with engine:
        for _ in range(2):
            for x, y in loader:
                seen.append(float(x.sum()))
                loss = (engine(x) - y).pow(2).mean()
                engine.backward(loss)
                engine.step()
            engine.flush()
            norms.append(engine.get_global_grad_norm())
        return {
            "rank": (engine.global_rank, engine.world_size),
            "batch": engine.train_batch_size(),
            "steps": engine.global_steps,
            "batches": len(seen),
            "seen": seen,
            "norms": norms,
            "weights": digest(list(engine.state_dict().values())),
        }


def differ(what: str) -> None:
    """Begin with something else on rank 1."""
    other = os.environ["RANK"] == "1"
    torch.manual_seed(2 if what == "seed" and other else 1)
    model = mlp(6 if what == "model" and other else 5)
    if what == "weights" and other:
        with torch.no_grad():
            model[0].weight[0, 0] += 1e-3
    settings = config(train_micro_batch_size_per_gpu=8 if what == "config" and other else 4)
    if what == "key" and other:
        settings["gradient_cliping"] = 1.0
    forebay.initialize(model=model, config=settings)


def steps(engine: Any, count: int) -> None:
    own = torch.linspace(-1, 1 + int(os.environ["RANK"]) / 7, 12).view(4, 3)
    for _ in range(count):
        engine.backward(engine(own).pow(2).mean())
        engine.step()


def wrong_batch() -> None:
    """Batch sizes that three ranks cannot have."""
    torch.manual_seed(1)
    forebay.initialize(model=mlp(), config=config(train_batch_size=16))


def passes(extra: int) -> None:
    """Rank 1 trains `extra` steps more (or fewer) than the others, then all leave."""
    torch.manual_seed(1)
    with forebay.initialize(model=mlp(), config=config())[0] as engine:
        steps(engine, 2 + (extra if os.environ["RANK"] == "1" else 0))


def stays_away() -> tuple[str, float]:
    """Rank 2 does something else for ever, though it is alive: what is said, and how soon."""
    torch.manual_seed(1)
    engine = forebay.initialize(model=mlp(), config=config())[0]
    steps(engine, 1)
    if os.environ["RANK"] == "2":
        time.sleep(60)
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        steps(engine, 1)
    return str(caught.value), time.monotonic() - began


def comes_late() -> None:
    """Rank 2 comes to its second step when the others have given up."""
    torch.manual_seed(1)
    settings = config(forebay={"rank_timeout": 2})
    engine = forebay.initialize(model=mlp(), config=settings)[0]
    steps(engine, 1)
    if os.environ["RANK"] == "2":
        time.sleep(8)
    try:
        steps(engine, 1)
    finally:
        time.sleep(4)  # rank 0 keeps the store


def evaluates_instead() -> None:
    """Rank 1 makes a step without a backward's exchange: another window."""
    torch.manual_seed(1)
    engine = forebay.initialize(model=mlp(), config=config(gradient_accumulation_steps=2))[0]
    if os.environ["RANK"] == "1":
        engine.set_gradient_accumulation_boundary(is_boundary=True)
    steps(engine, 2)


def is_killed() -> str:
    """Rank 1 is killed in the middle of a backward."""
    torch.manual_seed(1)
    model = mlp()
    engine = forebay.initialize(model=model, config=config())[0]
    steps(engine, 1)
    if os.environ["RANK"] == "1":
        model[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    steps(engine, 2)
    return "not reached"


def uneven_use(stage: int = 2) -> dict[str, Any]:
    """Ranks use different experts and skip modules; what no rank used is not updated."""
    torch.manual_seed(1)
    said = io.StringIO()
    logging.getLogger("forebay").addHandler(logging.StreamHandler(said))
    model = nn.ModuleList([nn.Linear(3, 3) for _ in range(5)])
    rank = int(os.environ["RANK"])
    before = [p.detach().clone() for p in model.parameters()]
    engine = forebay.initialize(model=model, config=config(stage, gradient_clipping=0.0))[0]
    x = torch.ones(2, 3)
    for step in range(3):
        out = model[0](x)
        if step != 1 or rank != 2:  # rank 2 skips in the second step
            out = model[1 + rank](out)
        with torch.no_grad():
            model[rank](x)  # an evaluation in between, another on each rank
        engine.backward(out.pow(2).mean())
        engine.step()
    engine.synchronize()
    after = list(model.state_dict().values())
    moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    steps = [record.step for record in engine.core.collector.records]
    weights = digest(after)
    uneven = engine.core.ranks.queue.passes.uneven
    engine.close()
    return {
        "moved": moved,
        "steps": steps,
        "weights": weights,
        "uneven": uneven,
        "said": said.getvalue(),
    }


def other_orders(stage: int, offload: bool) -> dict[str, Any]:
    """Each rank runs layers in an order of its own, with room for a few of them at a time."""
    torch.manual_seed(1)
    rank = int(os.environ["RANK"])
    model = nn.ModuleList([nn.Linear(8, 8) for _ in range(7)])
    settings = config(stage, gradient_clipping=0.5)
    settings["zero_optimization"] |= {"stage3_max_live_parameters": 3 * 72}
    if offload:
        settings["zero_optimization"]["offload_param"] = {"device": "cpu"}
    engine = forebay.initialize(model=model, config=settings)[0]
    draw = torch.Generator().manual_seed(40 + rank)
    x = torch.linspace(-1, 1, 8).repeat(2, 1) * (1 + rank)
    with record(engine.core) as recording:
        for step in range(6):
            order = torch.randperm(7, generator=draw).tolist()
            out = x
            for index in order[: 7 - step % 3]:
                out = out + torch.tanh(model[index](out))
            engine.backward(out.pow(2).mean())
            engine.step()
            if step % 3 == rank:
                with torch.no_grad():
                    for layer in model:
                        x = x + 0 * layer(x)
    shown = sum(break_down(one).gathers_uneven for one in recording.records)
    weights = digest(list(engine.state_dict().values()))
    uneven = engine.core.ranks.queue.passes.uneven
    engine.close()
    refused = stage < 3 or _refuses_to_read(model, settings)
    return {"weights": weights, "uneven": uneven, "shown": shown, "refused": refused}


def _refuses_to_read(model: nn.ModuleList, settings: dict[str, Any]) -> bool:
    """No rank has the weights any more: nobody gets NaN without a word."""
    for read in (lambda: model[0](torch.ones(1, 8)), lambda: model[1].weight, model.state_dict):
        with pytest.raises(EngineClosedError, match="spread over ranks"):
            read()
    # or, where another rank was faster: that it failed with these words
    with pytest.raises((UnsupportedError, RankError), match="has no value"):
        forebay.initialize(model=model, config=settings)
    return True


def whole_values(stage: int, folder: str) -> dict[str, Any]:
    """Read and write whole values of sharded parameters; rank 1 alone writes in a window."""
    from forebay.utils import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
    )

    torch.manual_seed(1)
    rank = int(os.environ["RANK"])
    model = nn.Sequential(nn.Linear(97, 149), nn.Linear(149, 2))
    weight, bias = model[0].weight, model[1].bias
    first = weight.detach().clone()
    plain = nn.Sequential(nn.Linear(97, 149), nn.Linear(149, 2))
    plain.load_state_dict(model.state_dict())
    engine = forebay.initialize(model=model, config=config(stage, gradient_clipping=0.0))[0]
    checks = {"master": bool(torch.equal(safe_get_full_fp32_param(weight), first))}
    grads = []
    for other in range(3):
        plain.zero_grad()
        plain(torch.full((2, 97), 1.0 + other)).pow(2).mean().backward()
        grads.append(plain[0].weight.grad.clone())
    engine.backward(engine(torch.full((2, 97), 1.0 + rank)).pow(2).mean())
    mean = (grads[0] + grads[1] + grads[2]) / 3
    checks["gradient"] = bool(torch.equal(safe_get_full_grad(weight), mean))
    engine.step()
    moment = safe_get_full_optimizer_state(weight, "exp_avg")
    checks["moment"] = bool(torch.allclose(moment, 0.1 * mean, rtol=1e-5))
    wanted = torch.arange(2.0)
    safe_set_full_fp32_param(bias, wanted)
    safe_set_full_optimizer_state(weight, torch.ones(149, 97), "exp_avg_sq")
    with forebay.zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        weight.fill_(float(10 * rank))
    checks["written"] = bool((safe_get_full_fp32_param(weight) == 10.0).all())
    checks["set"] = bool(torch.equal(safe_get_full_fp32_param(bias), wanted))
    ones = safe_get_full_optimizer_state(weight, "exp_avg_sq")
    checks["state"] = bool((ones == 1.0).all())
    out = engine(torch.ones(1, 97)).sum().item()
    engine.zero_grad()
    mine = Path(folder, str(rank))
    engine.save_16bit_model(mine)
    checks["saved"] = (mine / "model.safetensors").exists() == (rank == 0)
    engine.close()
    return {"checks": checks, "out": out}


def closes_in_a_row() -> list[float]:
    """Engines one after the other, and collectives of the caller's own right behind each."""
    sums = []
    for count in range(4):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
        engine = forebay.initialize(model=model, config=config(3))[0]
        engine.backward(engine(torch.ones(4, 16)).pow(2).mean())
        engine.step()  # brings up weights for a forward that does not come
        engine.close()
        number = torch.tensor([float(count)])
        torch.distributed.all_reduce(number)
        sums.append(float(number))
    assert len(_world.pg_names) == 1, "groups of closed engines are still there"
    return sums


def host_share(budget: str) -> dict[str, Any]:
    """Every rank holds all state on the host, under a budget for the machine."""
    from forebay.tiers.ledger import Tier

    torch.manual_seed(1)
    settings = config(0, forebay={"host_budget": budget})
    with forebay.initialize(model=mlp(), config=settings)[0] as engine:
        return {"budget": engine.core.ledger.budget(Tier.HOST)}


def command_line(words: list[str]) -> int:
    """`forebay train` with these flags."""
    from forebay.cli.main import main

    return main(["train", *words])


def stopped_command_line(words: list[str], step: int, rank: int) -> int:
    """`command_line`, where one rank gets a SIGTERM after a step."""
    from forebay.train.report import RunReporter

    report = RunReporter.step

    def step_then_stop(self: Any, record: Any) -> None:
        report(self, record)
        if record.step == step and os.environ["RANK"] == str(rank):
            os.kill(os.getpid(), signal.SIGTERM)

    RunReporter.step = step_then_stop  # type: ignore[method-assign]
    return command_line(words)


def starts_again(port: int) -> list[float]:
    """Twice a group and an engine of it, in a store that outlives both, as torchrun's does."""
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=str(port))
    norms = []
    for _ in range(3):
        torch.manual_seed(1)
        with forebay.initialize(model=mlp(), config=config(1))[0] as engine:
            steps(engine, 1)
            norms.append(float(engine.get_global_grad_norm()))
        torch.distributed.destroy_process_group()
    return norms


def joins_alone(seconds: float) -> str:
    """Wait for a rank that does not come; after a second there is a signal."""
    from forebay.compat.distributed import init_in_time
    from forebay.train.signals import StopSignals

    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with StopSignals(print):
        try:
            init_in_time(seconds)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
    return "joined"


def sums_of_its_own(stage: int) -> list[float]:
    """A script that adds up a number over ranks behind each step, beside gathers of the engine."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(12)))
    sums = []
    with forebay.initialize(model=model, config=config(stage))[0] as engine:
        groups = len(_world.pg_names)
        for step in range(12):
            engine.backward(engine(torch.ones(4, 40)).pow(2).mean())
            engine.step()
            for _ in range(5):
                number = torch.full((1000,), float(step))
                torch.distributed.all_reduce(number)
            sums.append(float(number.max()))
        # none is made beside the script, which may make its own at any time
        assert len(_world.pg_names) == groups
    return sums
