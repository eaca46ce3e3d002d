"""Memory of building a model, plain and inside `forebay.zero.Init`, until it can be trained.

    python benchmarks/build_memory.py --ranks 1,2 --output benchmarks/results

A Llama of 187M parameters made by `from_config`, in bf16 with weights and state on the host (stage
3). The peak is the kernel's (VmHWM) of a fresh process, beyond what it had before the model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import forebay

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
    "forebay": {"rank_timeout": 120},
}
COLUMNS = ("built_seconds", "built_peak", "built", "ready_seconds", "ready_peak", "ready")


def status(line: str) -> int:
    """Bytes that the kernel counts for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(text.split()[1]) for text in lines if text.startswith(line)) << 10


def work(how: str, folder: Path) -> None:
    import transformers

    shape = transformers.LlamaConfig(
        vocab_size=16000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
    )
    context = forebay.zero.Init(config_dict_or_path=CONFIG) if how == "Init" else None
    torch.manual_seed(0)
    with context or contextlib.nullcontext():
        nn.Linear(256, 256)  # loads what it needs
    before, began = status("VmRSS"), time.monotonic()
    if how == "Init":
        context = forebay.zero.Init(config_dict_or_path=CONFIG)
    with context or contextlib.nullcontext():
        model = transformers.AutoModelForCausalLM.from_config(shape)
    found: dict[str, float] = {
        "parameters": sum(param.numel() for param in model.parameters()),
        "built_seconds": time.monotonic() - began,
        "built_peak": status("VmHWM") - before,
        "built": status("VmRSS") - before,
    }
    engine = forebay.initialize(model=model, config=CONFIG)[0]
    found |= {
        "ready_seconds": time.monotonic() - began,
        "ready_peak": status("VmHWM") - before,
        "ready": status("VmRSS") - before,
    }
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    engine.close()
    os._exit(0)


def table(results: dict[str, dict[str, float]]) -> str:
    lines = [
        "| | built, s | peak, MiB | after, MiB | ready, s | peak, MiB | after, MiB |",
        "|---" * 7 + "|",
    ]
    for name, found in results.items():
        cells = [
            f"{found[key]:.1f}" if key.endswith("seconds") else f"{found[key] / 2**20:.0f}"
            for key in COLUMNS
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker[0], Path(options.worker[1]))
    results: dict[str, dict[str, float]] = {}
    for count in map(int, options.ranks.split(",")):
        for how in ("plain", "Init"):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                command += ["--nproc-per-node", str(count), __file__, "--worker", how, folder]
                environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
                subprocess.run(command, check=True, env=environment, timeout=600)
                of = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
            results[f"{how}, {count} ranks"] = {key: max(one[key] for one in of) for key in of[0]}
    text = table(results)
    print(text)
    if options.output is not None:
        head = f"`python {' '.join(sys.argv)}`: the fullest rank, a Llama of 187M parameters (713 "
        head += f"MiB in fp32), torch {torch.__version__}.\n\n"
        (options.output / "build-memory-cpu.md").write_text(head + text + "\n")
        (options.output / "build-memory-cpu.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
