"""How training scales over ranks: stages and offloads at 1, 2, 4, 8 ranks of one host.

The driver starts torchrun once for each number of ranks; every combination trains in turn in
those processes, and each rank writes its figures, which the driver puts into one table.

    python benchmarks/scaling.py --shape 3b --device cuda --ranks 1,2,4,8 --output results
    python benchmarks/scaling.py --shape tiny --ranks 1,2,3    # the dry run, over gloo

On GPUs with NVLink multicast it is switched off (NCCL_NVLS_ENABLE=0).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

SHAPES = {
    "3b": {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24,
           "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 4, "intermediate_size": 172, "vocab_size": 512},
}  # fmt: skip
BATCHES = {"3b": (8, 2048), "tiny": (2, 32)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One combination: what is sharded, and what lives on the host."""

    stage: int
    offload: str

    @property
    def config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage}
        if self.offload != "none":
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.offload == "params":
            zero["offload_param"] = {"device": "cpu"}
        return {"zero_optimization": zero}


def cases(stages: list[int], offloads: list[str]) -> list[Case]:
    """Parameters are offloaded in stage 3 alone."""
    pairs = [(stage, offload) for stage in stages for offload in offloads]
    return [Case(stage=s, offload=o) for s, o in pairs if o != "params" or s == 3]


def build(shape: str, device: str) -> torch.nn.Module:
    """A Llama with random weights, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    values = {**SHAPES[shape], "tie_word_embeddings": True, "max_position_embeddings": 8192}
    with torch.device("cpu"):
        model = LlamaForCausalLM(LlamaConfig(**values))
    model = model.to(torch.bfloat16 if device != "cpu" else torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.config.use_cache = False
    return model


def run_case(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Train; the first step warms up, the last ones are timed."""
    import forebay

    rows, length = BATCHES[options.shape]
    model = build(options.shape, options.device)
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        **({"bf16": {"enabled": True}} if options.device != "cpu" else {}),
        **case.config,
    }
    engine = forebay.initialize(model=model, config=config)[0]
    generator = torch.Generator().manual_seed(7 + engine.global_rank)
    vocabulary = SHAPES[options.shape]["vocab_size"]
    seconds, update_seconds, losses = [], [], []
    traffic: dict[str, int] = {}
    for step in range(options.steps + 1):
        tokens = torch.randint(vocabulary, (rows, length), generator=generator)
        tokens = tokens.to(engine.device)
        before = {lane.value: n for lane, n in engine.core.traffic.items()}
        began = time.perf_counter()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        stepped = time.perf_counter()
        engine.step()
        if step == options.steps:  # the update alone: nothing of the next forward hides it
            engine.synchronize()
            update_seconds.append(time.perf_counter() - stepped)
        losses.append(float(loss.detach()))
        if 0 < step < options.steps:
            seconds.append(time.perf_counter() - began)
            now = {lane.value: n for lane, n in engine.core.traffic.items()}
            traffic = {lane: now[lane] - before[lane] for lane in now}
    queue = engine.core.ranks.queue
    counts = {} if queue is None else queue.collectives.nbytes
    result = {
        **asdict(case),
        "rank": engine.global_rank,
        "ranks": engine.world_size,
        "seconds": statistics.median(seconds),
        "spread": [min(seconds), max(seconds)],
        "update_seconds": update_seconds[0],
        "tokens": rows * length,
        "down_bytes": traffic.get("down", 0),
        "up_bytes": traffic.get("up", 0),
        "rank_bytes": {key.value: n / (options.steps + 1) for key, n in counts.items()},
        "ledger": {f"{r.tier.value} {r.role.value}": r.nbytes for r in engine.ledger.table()},
        "device_peak": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        "norm": engine.get_global_grad_norm(),
        "losses": losses,
    }
    total = hashlib.sha256()
    for value in engine.state_dict().values():
        total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    result["weights"] = total.hexdigest()[:16]
    engine.close()
    return result


def work(options: argparse.Namespace) -> None:
    """One rank: all combinations, one after the other."""
    results = []
    for case in cases(options.stages, options.offloads):
        results.append(run_case(case, options))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    rank = os.environ.get("RANK", "0")
    Path(options.worker, f"rank-{rank}.json").write_text(json.dumps(results))
    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()


def start(count: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run `count` ranks; every rank's figures."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(count), __file__, "--worker", folder]
        command += ["--shape", options.shape, "--device", options.device]
        command += ["--steps", str(options.steps)]
        command += ["--stages", ",".join(map(str, options.stages))]
        command += ["--offloads", ",".join(options.offloads)]
        environment = {**os.environ, "NCCL_NVLS_ENABLE": "0"}
        if options.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        subprocess.run(command, check=True, env=environment)
        files = sorted(Path(folder).glob("rank-*.json"))
        return [result for file in files for result in json.loads(file.read_text())]


def table(results: list[dict[str, Any]]) -> str:
    """One line for each number of ranks and combination; figures of all ranks put together."""
    lines = [
        "| ranks | stage | offload | s/step | tokens/s | down GB/s a rank | up GB/s a rank "
        "| host link GB/s in all | host GB a rank | device GB a rank | update s | weights |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((r["ranks"], r["stage"], r["offload"]) for r in results)
    for key in keys:
        of = [r for r in results if (r["ranks"], r["stage"], r["offload"]) == key]
        slowest = max(r["seconds"] for r in of)
        down, up = (max(r[f"{way}_bytes"] for r in of) / slowest / 1e9 for way in ("down", "up"))
        every = sum(r["down_bytes"] + r["up_bytes"] for r in of) / slowest / 1e9
        host, device = (
            max(sum(n for name, n in r["ledger"].items() if name.startswith(tier)) for r in of)
            for tier in ("host", "device")
        )
        update = max(r["update_seconds"] for r in of)
        same = {r["weights"] for r in of}
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]} | {slowest:.4g} "
            f"| {sum(r['tokens'] for r in of) / slowest:,.0f} | {down:.3g} | {up:.3g} "
            f"| {every:.3g} "
            f"| {host / 1e9:.3g} | {device / 1e9:.3g} | {update:.3g} "
            f"| {same.pop() if len(same) == 1 else 'DIFFER'} |"
        )
    return "\n".join(lines)


def refuse_different_bits(results: list[dict[str, Any]]) -> None:
    """At one number of ranks every combination has the same weights."""
    for count in {r["ranks"] for r in results}:
        found = {r["weights"] for r in results if r["ranks"] == count}
        if len(found) > 1:
            sys.exit(f"{count} ranks ended with {len(found)} different sets of weights: {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--ranks", default="1,2,3")
    parser.add_argument("--stages", default="1,2,3")
    parser.add_argument("--offloads", default="none,cpu,params")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.stages = [int(stage) for stage in options.stages.split(",")]
    options.offloads = options.offloads.split(",")
    if options.worker:
        work(options)
        return
    results = [r for count in options.ranks.split(",") for r in start(int(count), options)]
    text = table(results)
    print(text)
    if options.output is not None:
        name = f"scaling-{options.shape}-{options.device}-torch{torch.__version__.split('+')[0]}"
        (options.output / f"{name}.json").write_text(json.dumps(results, indent=1))
        head = f"`{' '.join(sys.argv)}` on {platform.processor() or platform.machine()}\n\n"
        (options.output / f"{name}.md").write_text(head + text + "\n")
    refuse_different_bits(results)


if __name__ == "__main__":
    main()
