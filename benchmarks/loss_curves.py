"""Loss curves of the update policies on real text: one model, one order of data, one picture.

A byte-level transformer is trained from the same start under each policy, its state in host memory.
Policies take turns, some steps each, so that all meet the same machine. Losses of every step and of
text that is never trained on are written with the tokens per second of each policy.

    python benchmarks/loss_curves.py --text FILE --output results
    python benchmarks/loss_curves.py --text FILE --size gpu --output results    # under two minutes
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from forebay.accelerators.select import default_device, device_name
from forebay.engine import EngineOptions, offload_with
from forebay.hardware.profile import Machine
from forebay.plan.placement import UpdatePlace
from forebay.plan.policies import EXACT, Delayed, Policy
from forebay.plan.zenflow import ZenFlow

# Delayed and zenflow warm up as their papers do: the first steps are exact.
WARM_UP = 40
POLICIES: dict[str, Policy] = {
    "exact": EXACT,
    "delayed": Delayed(warm_up_steps=WARM_UP),
    "zenflow": ZenFlow(
        topk_ratio=0.1, update_every=4, select_every=100, warm_up_steps=WARM_UP, overlaps=True
    ),
}
# Steps of a policy before the next one's turn.
TURN = 20
_EVERY = 100
_RATE = 1e-3


@dataclass(frozen=True)
class Size:
    """A model and its batches."""

    width: int
    layers: int
    heads: int
    context: int
    rows: int
    dtype: torch.dtype


SIZES = {
    "cpu": Size(64, 2, 4, 64, 8, torch.float32),
    "gpu": Size(512, 8, 8, 256, 32, torch.bfloat16),
}


class ByteModel(nn.Module):
    """Predicts the next byte."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size.width,
                size.heads,
                4 * size.width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)
        ahead = torch.ones(size.context, size.context, dtype=torch.bool).triu(1)
        self.register_buffer("ahead", ahead, persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Mean loss of rows of context + 1 bytes."""
        seen, wanted = text[:, :-1], text[:, 1:]
        x = self.tokens(seen) + self.places.weight
        for block in self.blocks:
            x = block(x, src_mask=self.ahead)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


@dataclass
class Run:
    """One policy at work.

    Attributes:
        losses: Of every step.
        held_out: (step, loss) on text that is not trained on.
        seconds: (steps, seconds) of each turn.
    """

    model: nn.Module
    optimizer: Any
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    seconds: list[tuple[int, float]] = field(default_factory=list)

    def train(self, batches: list[torch.Tensor], *, step: int) -> None:
        """A turn."""
        began, losses = time.perf_counter(), []
        for count, batch in enumerate(batches):
            for group in self.optimizer.param_groups:
                group["lr"] = _RATE * min(1.0, (step + count + 1) / 100)
            loss = self.model(batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        self.losses += torch.stack(losses).tolist()
        # what still runs belongs to this turn
        self.optimizer.engine.lanes.drain()
        self.seconds.append((len(batches), time.perf_counter() - began))

    @torch.no_grad()
    def evaluate(self, rows: torch.Tensor, *, step: int) -> None:
        """Loss on other text, with the weights in force."""
        self.held_out.append((step, statistics.mean(self.model(r).item() for r in rows.split(8))))

    def tokens_per_second(self, tokens: int) -> list[float]:
        """Of each turn but the first."""
        return [count * tokens / seconds for count, seconds in self.seconds[1:]]


def start(policy: Policy, size: Size, *, device: torch.device) -> Run:
    """The same model every time, its state in host memory."""
    torch.manual_seed(0)
    model = ByteModel(size).to(size.dtype)
    source = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.1)
    options = EngineOptions(
        device=device, clip_norm=1.0, update=UpdatePlace.HOST, policy=policy, backwards=1
    )
    return Run(*offload_with(model, source, options=options))


def train(text: bytes, size: Size, *, steps: int, device: torch.device) -> dict[str, Run]:
    """All policies, by turns."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
    split = int(0.95 * len(data))
    width = size.context + 1
    held = data[split : split + (len(data) - split) // width * width].view(-1, width)[:64]
    runs = {name: start(policy, size, device=device) for name, policy in POLICIES.items()}
    generator = torch.Generator().manual_seed(1)
    for step in range(0, steps, TURN):
        batches = []
        for _ in range(min(TURN, steps - step)):
            at = torch.randint(split - width, (size.rows,), generator=generator)
            batches.append(torch.stack([data[i : i + width] for i in at.tolist()]))
        for name, run in runs.items():
            run.train(batches, step=step)
            done = step + len(batches)
            if done % _EVERY == 0 or done == steps:
                run.evaluate(held, step=done)
                said = f"{run.losses[-1]:.4f}, held out {run.held_out[-1][1]:.4f}"
                print(f"{done:5d} {name:8s} {said}", file=sys.stderr, flush=True)
    return runs


def table(runs: dict[str, Run], *, tokens: int) -> str:
    """A row for each policy."""
    lines = [
        "| policy | training loss, mean of the last 100 steps | held-out loss at the end "
        "| least held-out loss | tokens/s, median of turns (quartiles) |",
        "|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        speeds = run.tokens_per_second(tokens)
        low, middle, high = statistics.quantiles(speeds, n=4)
        lines.append(
            f"| {name} | {statistics.mean(run.losses[-100:]):.4f} | {run.held_out[-1][1]:.4f} "
            f"| {min(loss for _, loss in run.held_out):.4f} "
            f"| {middle:,.0f} ({low:,.0f} to {high:,.0f}) |"
        )
    return "\n".join(lines) + "\n"


def draw(path: Path, runs: dict[str, Run], *, tokens: int) -> None:
    """Training losses, smoothed over 25 steps, and held-out losses."""
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(9, 5), layout="constrained"
    )
    axes = figure.subplots()
    for name, run in runs.items():
        smooth = [statistics.mean(run.losses[max(0, i - 25) : i]) for i in _ends(run)]
        speed = statistics.median(run.tokens_per_second(tokens))
        (line,) = axes.plot(_ends(run), smooth, label=f"{name}: {speed:,.0f} tokens/s", lw=1.2)
        axes.plot(*zip(*run.held_out, strict=True), "--o", color=line.get_color(), ms=3, lw=0.8)
    axes.set(xlabel="step", ylabel="loss per byte (nats); dashed: text that is not trained on")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _ends(run: Run) -> range:
    return range(25, len(run.losses) + 1, 5)


def write(folder: Path, runs: dict[str, Run], *, size: Size, device: torch.device) -> None:
    """Numbers, table and picture."""
    machine = Machine.read(device_name(device))
    words = f"{machine.cpu} {machine.cpus} cpus {machine.device} torch {torch.__version__}"
    words = words.partition("+")[0].lower().replace("/", "-")
    stem = folder / "-".join(("loss-curves", *words.split()))
    folder.mkdir(parents=True, exist_ok=True)
    tokens = size.rows * size.context
    found = {
        "size": str(size),
        "policies": {name: repr(policy) for name, policy in POLICIES.items()},
        "steps_of_a_turn": TURN,
        "runs": {
            name: {
                "losses": [round(loss, 5) for loss in run.losses],
                "held_out": run.held_out,
                "turns": [(count, round(seconds, 5)) for count, seconds in run.seconds],
            }
            for name, run in runs.items()
        },
    }
    stem.with_name(f"{stem.name}.json").write_text(json.dumps(found) + "\n")
    params = sum(p.numel() for p in runs["exact"].model.parameters())
    head = (
        f"{len(runs['exact'].losses)} steps of {tokens} tokens, {params:,} parameters in "
        f"{size.dtype}; policies take turns of {TURN} steps.\n\n"
    )
    stem.with_name(f"{stem.name}.md").write_text(head + table(runs, tokens=tokens))
    draw(stem.with_name(f"{stem.name}.png"), runs, tokens=tokens)


def main() -> None:
    """Train, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="a file of about a megabyte")
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    size, device = SIZES[given.size], default_device()
    runs = train(given.text.read_bytes(), size, steps=given.steps, device=device)
    print(table(runs, tokens=size.rows * size.context))
    if given.output is not None:
        write(given.output, runs, size=size, device=device)
    for run in runs.values():
        run.optimizer.close()


if __name__ == "__main__":
    main()
