"""A small training run on several ranks, and what is compared between two of them."""

from __future__ import annotations

import hashlib
import tempfile
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import distributed, nn

from forebay.comm.exchange import Exchange
from forebay.comm.fake import SlowGroup
from forebay.comm.torch_group import TorchGroup
from forebay.engine import EngineOptions, offload_with
from forebay.engine.file_space import NvmeOptions
from forebay.engine.layer_order import LayerOrder
from forebay.engine.optimizer import OffloadedOptimizer
from forebay.links.fake import FileFaultScript
from forebay.links.host_nvme import FileAccess
from forebay.plan import UpdatePlace, WeightPlace
from forebay.plan.load_rules import LoadRules
from forebay.plan.placement import AccumulationOrder
from forebay.plan.policies import EXACT, Policy
from forebay.plan.program import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# One small buffer: every piece of every rank comes and goes in every step.
_FILES = NvmeOptions(paths=(Path(tempfile.gettempdir()),), buffer_count=1, buffer_elements=1)


@dataclass(frozen=True)
class Recipe:
    """How to train; everything that may not change a bit, and what may."""

    stage: int = 0
    place: UpdatePlace = UpdatePlace.HOST
    weights: WeightPlace = WeightPlace.DEVICE
    unit_elements: int | None = None
    micro: int = 1
    dtype: torch.dtype = torch.bfloat16
    steps: int = 3
    clip: float | None = 2.0
    pool_bytes: int | None = None
    blocks: int = 0
    device: str = "cpu"
    backend: str = "gloo"
    slow_seconds: float = 0.0
    think_seconds: float = 0.0
    exchange: Exchange = field(default_factory=Exchange)
    sharers: int | None = None
    policy: Policy = EXACT
    loads: LoadRules = field(default_factory=LoadRules)
    order: AccumulationOrder = AccumulationOrder.MICROBATCH
    host_budget: int | None = None
    late_files_us: int = 0
    differentiates_inputs: bool = False


def model_of(dtype: torch.dtype, blocks: int = 0) -> nn.Module:
    """Odd sizes; a weight over several shards, biases with fewer elements than ranks, an empty one.

    Small units lie on one rank, whose peers then have empty shards.
    """
    torch.manual_seed(0)
    if blocks:
        return nn.Sequential(*(nn.Linear(13, 13) for _ in range(blocks))).to(dtype)
    layers = [nn.Linear(13, 151), nn.GELU(), nn.Linear(151, 107), nn.GELU(), nn.Linear(107, 2)]
    model = nn.Sequential(*layers).to(dtype)
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, dtype=dtype)))
    return model


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Two groups that interleave in the model."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "lr": 3e-3}], lr=1e-2
    )


def digest(tensors: list[torch.Tensor]) -> str:
    """Of all bits."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def join(backend: str = "gloo") -> None:
    """Make the default group, once in a process."""
    if not distributed.is_initialized():
        distributed.init_process_group(backend)


def device_of(recipe: Recipe) -> torch.device:
    """This rank's device; ranks share a GPU where there are fewer."""
    if recipe.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", distributed.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def windows(recipe: Recipe, *, rank: int) -> list[list[torch.Tensor]]:
    """A rank's inputs, by update and micro-batch; the first updates' gradients are clipped."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        [
            (torch.randn(5, 13, generator=generator) * (3.0 if step % 2 == 0 else 0.1)).to(
                recipe.dtype
            )
            for _ in range(recipe.micro)
        ]
        for step in range(recipe.steps)
    ]


def loss_of(model: nn.Module, x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """A mean over the micro-batch, as a share of the window."""
    given = x.requires_grad_(recipe.differentiates_inputs)
    return (model(given).float() - 1.0).pow(2).mean() / recipe.micro


def _think(model: nn.Module, seconds: float) -> None:
    """Each block computes for longer, in forward and in backward."""

    def _wait(*_: object) -> None:
        time.sleep(seconds)

    for block in model:
        block.register_forward_hook(_wait)
        block.weight.register_hook(_wait)


def _one_by_one(losses: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
    """Forward and backward of one micro-batch after the other."""
    found = []
    for share in losses:
        loss = share()
        loss.backward()
        found.append(loss.detach())
    return found


def _files(recipe: Recipe) -> NvmeOptions:
    if not recipe.late_files_us:
        return _FILES
    late = FileFaultScript(seed=3, max_delay_us=recipe.late_files_us)
    return replace(_FILES, access=FileAccess(fault=late))


def begin(recipe: Recipe, group: TorchGroup | SlowGroup) -> tuple[nn.Module, OffloadedOptimizer]:
    """The model on this rank, and its optimizer."""
    model = model_of(recipe.dtype, recipe.blocks)
    source = optimizer_of(model)
    if recipe.think_seconds:
        _think(model, recipe.think_seconds)
    options = EngineOptions(
        device=device_of(recipe),
        update=recipe.place,
        weights=recipe.weights,
        pool_bytes=recipe.pool_bytes,
        unit_elements=recipe.unit_elements,
        backwards=recipe.micro,
        clip_norm=recipe.clip,
        threads=1,
        group=group,
        stage=recipe.stage,
        exchange=recipe.exchange,
        loads=recipe.loads,
        nvme=_files(recipe) if recipe.place is UpdatePlace.NVME else None,
        policy=recipe.policy,
        order=recipe.order,
        host_budget=recipe.host_budget,
    )
    return offload_with(model, source, options=options)


def train(recipe: Recipe) -> dict[str, object]:
    """Train; the data depend on rank and step alone."""
    join(recipe.backend)
    device = device_of(recipe)
    group: TorchGroup | SlowGroup = TorchGroup()
    if recipe.sharers is not None:
        count = recipe.sharers
        group.divide([range(n, n + count) for n in range(0, group.size, count)])
    if recipe.slow_seconds:
        group = SlowGroup(group, seconds=recipe.slow_seconds)
    model, optimizer = begin(recipe, group)
    losses, norms, began = [], [], time.monotonic()
    backward = _one_by_one
    if recipe.order is AccumulationOrder.LAYER:
        backward = LayerOrder(optimizer.engine).backward
    for window in windows(recipe, rank=distributed.get_rank()):
        shares = [partial(loss_of, model, x.to(device), recipe) for x in window]
        losses += [loss.item() for loss in backward(shares)]
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.last_grad_norm)
    optimizer.synchronize()
    seconds = time.monotonic() - began
    engine, queue = optimizer.engine, optimizer.engine.ranks.queue
    program = engine.current_program()
    result = {
        "losses": losses,
        "seconds": seconds,
        "slept": getattr(group, "slept_seconds", 0.0),
        "norms": norms,
        "weights": digest(list(model.state_dict().values())),
        "bytes": {} if queue is None else {k.value: n for k, n in queue.collectives.nbytes.items()},
        "traffic": {lane.value: n for lane, n in engine.traffic.items()},
        "planned": {lane.value: program.traffic(lane) for lane in Lane},
        "late": engine.streaming.residency.pool.late,
        "steps": [record.step for record in engine.collector.records],
        "slices": [
            (record.segment.start, record.segment.elements) for record in engine.collector.records
        ],
        "taken": getattr(engine.collector.policy, "taken", 0),
        "ledger": {f"{r.tier.value} {r.role.value}": r.nbytes for r in engine.ledger.table()},
    }
    optimizer.close()
    return result


def train_all(recipes: list[Recipe]) -> list[dict[str, object]]:
    """One after the other in the same processes."""
    return [train(recipe) for recipe in recipes]


def variants(base: Recipe) -> list[Recipe]:
    """Every stage, place and unit size."""
    return [
        replace(base, stage=stage, place=place, unit_elements=unit)
        for stage in (0, 1, 2, 3)
        for place in (UpdatePlace.HOST, UpdatePlace.DEVICE, UpdatePlace.NVME)
        for unit in (None, 1, 10**6)
    ]
