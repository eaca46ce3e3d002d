"""The plan beside the run: memory by tier and step seconds, predicted and measured.

In each repeat every workload trains in turn, the machine measured anew just before it; the figures
are medians over the repeats. With --output, a table and the raw numbers are written side by side.

    python benchmarks/predicted.py --output benchmarks/results
    python benchmarks/predicted.py --workloads w1,w2,w3,w4-4k,w4-32k --output benchmarks/results
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import forebay
from forebay.accelerators.select import default_device, device_name
from forebay.hardware.profile import Machine, Profile
from forebay.plan.model_config import shape_of
from forebay.plan.ready import ready_config
from forebay.plan.setup import Home, Setup
from forebay.plan.step import step_forecast
from forebay.plan.tiers import tier_bytes
from forebay.plan.workload import Precision, Recompute, Workload
from forebay.probe.measuring import Effort, measure

_LLAMA = {"model_type": "llama", "max_position_embeddings": 8192}
_3B = {
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
_7B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}
_SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 1024,
    "vocab_size": 2048,
}
_WIDE = {
    **_SMALL,
    "hidden_size": 640,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
    "intermediate_size": 1792,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload."""

    config: dict[str, Any]
    micro_batch: int
    sequence: int
    accumulation: int = 1
    precision: Precision = Precision.BF16
    optimizer: Home = Home.HOST
    recompute: Recompute = Recompute.BLOCKS

    def setup(self) -> Setup:
        return Setup(
            stage=0 if self.optimizer is Home.DEVICE else 2,
            optimizer=self.optimizer,
            weights=Home.DEVICE,
            workload=Workload(
                micro_batch=self.micro_batch,
                accumulation=self.accumulation,
                sequence=self.sequence,
                precision=self.precision,
                recompute=self.recompute,
            ),
        )


_CPU = {"precision": Precision.FP32, "recompute": Recompute.NONE}
CASES = {
    "w1": Case(config=_3B, micro_batch=8, sequence=2048),
    "w1-none": Case(config=_3B, micro_batch=8, sequence=2048, optimizer=Home.DEVICE),
    "w2": Case(config=_3B, micro_batch=8, sequence=2048, accumulation=4),
    "w3": Case(config=_7B, micro_batch=8, sequence=2048),
    "w4-4k": Case(config=_3B, micro_batch=2, sequence=2048),
    "w4-8k": Case(config=_3B, micro_batch=4, sequence=2048),
    "w4-32k": Case(config=_3B, micro_batch=16, sequence=2048),
    "cpu-small": Case(config=_SMALL, micro_batch=4, sequence=128, **_CPU),
    "cpu-small-x4": Case(config=_SMALL, micro_batch=4, sequence=128, accumulation=4, **_CPU),
    "cpu-small-again": Case(
        config=_SMALL, micro_batch=4, sequence=128, **{**_CPU, "recompute": Recompute.BLOCKS}
    ),
    "cpu-wide": Case(config=_WIDE, micro_batch=2, sequence=128, **_CPU),
    "cpu-none": Case(config=_SMALL, micro_batch=4, sequence=128, optimizer=Home.DEVICE, **_CPU),
}


def measured(case: Case, *, device: torch.device, steps: int, profile: Profile) -> dict[str, Any]:
    """Train a few updates; bytes by tier and median seconds of an update."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**_LLAMA, **case.config)
    dtype = getattr(torch, case.precision.dtype)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if case.recompute is Recompute.BLOCKS:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # The engine chooses update places from the same figures as the plan.
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(profile.as_json())
        file.flush()
        config_of = ready_config(case.setup()) | {"forebay": {"profile": file.name}}
        engine, *_ = forebay.initialize(model=model, config=config_of)
    rows = (case.micro_batch, case.sequence)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    with engine:
        for step in range(steps + 2):
            began = time.perf_counter()
            for _ in range(case.accumulation):
                tokens = torch.randint(0, config.vocab_size, rows, device=device)
                engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                engine.step()
            if device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            if step >= 2:
                seconds.append(time.perf_counter() - began)
        tiers: dict[str, int] = {}
        for row in engine.ledger.table():
            tiers[row.tier.value] = tiers.get(row.tier.value, 0) + row.nbytes
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    del engine, model
    gc.collect()
    return {"seconds": statistics.median(seconds), "tiers": tiers, "peak": peak}


def predicted(case: Case, *, profile: Profile) -> dict[str, Any]:
    """The same from the planner."""
    shape = shape_of({**_LLAMA, **case.config}, source="case")
    setup = case.setup()
    tiers = tier_bytes(shape, setup)
    # Activations and gradients that wait are torch's; the ledger holds what forebay places.
    torch_holds = ("activations", "lp_grads")
    placed = sum(size for role, size in tiers.device.items() if role not in torch_holds)
    return {
        "seconds": step_forecast(shape, setup, profile=profile).seconds,
        "tiers": {"device": placed, "host": tiers.total("host")},
        "peak": tiers.total("device"),
    }


def run(names: list[str], *, device: torch.device, repeats: int, steps: int) -> dict[str, Any]:
    """Repeats of all cases in turn, the machine measured before each."""
    effort = Effort()
    if device.type == "cpu":
        effort = Effort(elements=4 << 20, link_bytes=64 << 20, repeats=3)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name in names:
            # Just before: a neighbour's load then weighs on both alike.
            profile = measure(device, effort=effort)
            found = measured(CASES[name], device=device, steps=steps, profile=profile)
            said = predicted(CASES[name], profile=profile)
            rows[name].append({"predicted": said, "measured": found})
            ratio = said["seconds"] / found["seconds"]
            print(f"repeat {repeat}: {name}: {ratio:.3f} of measured", file=sys.stderr, flush=True)
    return {"rows": rows, "profile": asdict(profile)}


def table(found: dict[str, Any]) -> str:
    """Medians over the repeats."""
    lines = [
        "| workload | step, predicted s | measured s | ratio (of each repeat) | least by least "
        "| host, predicted MB "
        "| measured | device placed, predicted MB | measured "
        "| device peak, predicted GB | measured |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, repeats in found["rows"].items():
        said = statistics.median(one["predicted"]["seconds"] for one in repeats)
        took = statistics.median(one["measured"]["seconds"] for one in repeats)
        ratios = [one["predicted"]["seconds"] / one["measured"]["seconds"] for one in repeats]
        last = repeats[-1]
        cells = [name, f"{said:.4f}", f"{took:.4f}"]
        spread = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        cells.append(f"{statistics.median(ratios):.2f} ({spread})")
        # Neighbours only ever add time: the least of both sides is the quiet machine's.
        least = [min(one[side]["seconds"] for one in repeats) for side in ("predicted", "measured")]
        cells.append(f"{least[0] / least[1]:.2f}")
        cells += [
            f"{last[side]['tiers'].get(tier, 0) / 1e6:,.1f}"
            for tier in ("host", "device")
            for side in ("predicted", "measured")
        ]
        peak = last["measured"]["peak"]
        cells += [f"{last['predicted']['peak'] / 1e9:.1f}", f"{peak / 1e9:.1f}" if peak else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    device = default_device()
    cpu = device.type == "cpu"
    usual = [name for name in CASES if name.startswith("cpu") is cpu]
    names = given.workloads.split(",") if given.workloads else usual
    found = run(names, device=device, repeats=given.repeats, steps=given.steps)
    text = table(found)
    print(text)
    if given.output is not None:
        machine = Machine.read(device_name(device))
        words = f"{machine.cpu} {machine.cpus} cpus {machine.device} torch {torch.__version__}"
        words = words.partition("+")[0].lower().replace("/", "-")
        stem = "-".join(("predicted", *words.split()))
        given.output.mkdir(parents=True, exist_ok=True)
        (given.output / f"{stem}.json").write_text(json.dumps(found, indent=1) + "\n")
        (given.output / f"{stem}.md").write_text(text)


if __name__ == "__main__":
    main()
