"""Losses of forebay's stages beside PyTorch FSDP2 and DeepSpeed: one model, one order of data.

    python benchmarks/losses_of_peers.py --output benchmarks/results
    python benchmarks/losses_of_peers.py --deepspeed-python other/bin/python

Each contestant trains a small transformer from the same weights on the same rows over gloo, with
AdamW and clipping. Bits differ, since each adds in an order of its own; losses must agree within a
tolerance. A peer that is not installed, or fails, is left out with its reason.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torchrun
from torch import distributed, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

CONTESTANTS = [
    *(f"forebay stage {stage}" for stage in range(4)),
    "FSDP2",
    *(f"DeepSpeed stage {stage}" for stage in (1, 2, 3)),
]
WORDS, WIDTH, CONTEXT, ROWS, BLOCKS = 64, 96, 32, 4, 3
RATE, DECAY, CLIP = 3e-3, 0.1, 1.0
# Of a loss, between the first contestant and another. Sums in another order differ by some 2^-24
# of their terms. In bf16 peers also round where forebay does not (sums of gradients, 2^-9 of each),
# which a mean over thousands of terms shrinks; a wrong mean, clip or decay is off by percents.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}


class Block(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.before(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Language(nn.Module):
    """A causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.words(rows) + self.places(torch.arange(rows.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build() -> nn.Module:
    """The same everywhere; values that bf16 holds exactly."""
    torch.manual_seed(0)
    model = Language()
    for param in model.parameters():
        param.data = param.data.bfloat16().float()
    return model


def rows_of(step: int, rank: int) -> torch.Tensor:
    """Rows whose next word follows from the last two, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    rows = torch.randint(0, WORDS, (ROWS, CONTEXT + 1), generator=generator)
    for at in range(2, CONTEXT + 1):
        rows[:, at] = (3 * rows[:, at - 1] + rows[:, at - 2] + 1) % WORDS
    return rows


def loss_of(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.float().flatten(0, 1), rows[:, 1:].flatten())


def config(stage: int, dtype: str) -> dict[str, Any]:
    """For forebay and DeepSpeed alike."""
    adam = {"lr": RATE, "weight_decay": DECAY, "betas": [0.9, 0.999], "eps": 1e-8}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {**adam, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }


def by_engine(library: Any, stage: int, dtype: str) -> Callable[[torch.Tensor], float]:
    """A step of an engine with DeepSpeed's face."""
    model = build()
    settings = config(stage, dtype)
    engine = library.initialize(model=model, model_parameters=model.parameters(), config=settings)[
        0
    ]

    def _step(rows: torch.Tensor) -> float:
        loss = loss_of(engine(rows[:, :-1]), rows)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return _step


def by_fsdp(dtype: str) -> Callable[[torch.Tensor], float]:
    """A step of `fully_shard`, blocks and root."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    low = torch.bfloat16 if dtype == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    model = build()
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)

    def _step(rows: torch.Tensor) -> float:
        loss = loss_of(model(rows[:, :-1]), rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return _step


def work(contestant: str, dtype: str, steps: int, folder: Path) -> None:
    """Train on this rank; rank 0 writes the means over ranks."""
    distributed.init_process_group("gloo")
    if contestant == "FSDP2":
        step = by_fsdp(dtype)
    else:
        name, stage = contestant.lower().split(" stage ")
        step = by_engine(importlib.import_module(name), int(stage), dtype)
    losses = torch.tensor([step(rows_of(i, distributed.get_rank())) for i in range(steps)])
    distributed.all_reduce(losses)
    if distributed.get_rank() == 0:
        torchrun.leave(folder, 0, (losses / distributed.get_world_size()).tolist())
    distributed.barrier()
    os._exit(0)


def run(contestant: str, dtype: str, *, options: argparse.Namespace) -> list[float] | str:
    """Losses by step, or why there are none."""
    is_deepspeed = contestant.startswith("DeepSpeed")
    python = options.deepspeed_python if is_deepspeed else sys.executable
    environment = torchrun.environment(DS_ACCELERATOR="cpu")
    start = partial(
        subprocess.run, check=False, capture_output=True, text=True, env=environment, timeout=300
    )
    if is_deepspeed:
        told = start([python, "-c", "import deepspeed"])
        if told.returncode:
            return (told.stderr.strip().splitlines() or ["it cannot be imported"])[-1]
    with tempfile.TemporaryDirectory() as folder:
        words = ["--worker", folder, "--contestant", contestant, "--dtype", dtype]
        words += ["--steps", str(options.steps)]
        command = torchrun.command(__file__, *words, ranks=options.ranks, python=python)
        try:
            told = start(command)
        except subprocess.TimeoutExpired:
            return "it did not end within 300 s"
        losses = torchrun.gather(folder)
        if not losses:
            errors = [line for line in told.stderr.splitlines() if "Error" in line]
            return errors[0] if errors else f"it ended with {told.returncode}"
        return losses[0]


def deepspeed_version(python: str) -> str:
    """Of the package that an interpreter finds, or none."""
    code = "from importlib.metadata import version; print(version('deepspeed'))"
    told = subprocess.run([python, "-c", code], check=False, capture_output=True, text=True)
    return f"DeepSpeed {told.stdout.strip()}" if told.returncode == 0 else "no DeepSpeed"


def apart(losses: list[float], of: list[float]) -> float:
    """The largest difference, relative to the loss."""
    return max(abs(a - b) / b for a, b in zip(losses, of, strict=True))


def table(results: dict[str, dict[str, list[float] | str]]) -> str:
    lines = [
        "| dtype | contestant | first loss | last loss | largest difference | tolerance |",
        "|---|---|---|---|---|---|",
    ]
    for dtype, by_name in results.items():
        of = by_name[CONTESTANTS[0]]
        for name, found in by_name.items():
            if isinstance(found, str) or isinstance(of, str):
                lines.append(f"| {dtype} | {name} | left out: {found} | | | |")
                continue
            cells = f"{found[0]:.5f} | {found[-1]:.5f} | {apart(found, of):.1e}"
            lines.append(f"| {dtype} | {name} | {cells} | {TOLERANCE[dtype]:.0e} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--deepspeed-python", default=sys.executable)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.contestant, options.dtype, options.steps, options.worker)
    results = {
        dtype: {name: run(name, dtype, options=options) for name in CONTESTANTS}
        for dtype in TOLERANCE
    }
    text = table(results)
    print(text)
    if options.output is not None:
        head = f"`python benchmarks/losses_of_peers.py --steps {options.steps}`: "
        head += f"{options.ranks} processes over gloo, {options.steps} steps, differences from "
        head += f"{CONTESTANTS[0]}, "
        peer = deepspeed_version(options.deepspeed_python)
        head += f"torch {torch.__version__}, {peer}.\n\n"
        (options.output / "losses-of-peers-cpu.md").write_text(head + text + "\n")
        (options.output / "losses-of-peers-cpu.json").write_text(json.dumps(results, indent=1))
    for dtype, by_name in results.items():
        of = by_name[CONTESTANTS[0]]
        for name, found in by_name.items():
            if isinstance(of, str) or (isinstance(found, str) and name.startswith("forebay")):
                sys.exit(f"{name} failed: {found}")
            if not isinstance(found, str) and apart(found, of) > TOLERANCE[dtype]:
                sys.exit(f"{name} is {apart(found, of):.1e} off in {dtype}")


if __name__ == "__main__":
    main()
