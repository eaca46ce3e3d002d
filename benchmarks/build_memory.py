"""Memory of building or loading a model, plain and by forebay's ways, until it can be trained.

    python benchmarks/build_memory.py --ranks 1,2 --output benchmarks/results

A Llama of 290M parameters in bf16, with weights and state on the host (stage 3): made by
`from_config`, plain and inside `forebay.zero.Init`; and from a folder of safetensors files, in bf16
or fp32, by `from_pretrained` and by what `forebay train` does with it. The peak is the kernel's
(VmHWM) of a fresh process, beyond what it had before the model; it counts the pages of files that
are read. Weights that `from_pretrained` need not cast are such pages until the engine has them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torchrun
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
WAYS = {
    "from_config": "",
    "zero.Init": "",
    "from_pretrained, bf16 files": "bfloat16",
    "forebay train, bf16 files": "bfloat16",
    "from_pretrained, fp32 files": "float32",
    "forebay train, fp32 files": "float32",
}
COLUMNS = ("built_seconds", "built_peak", "built", "ready_seconds", "ready_peak", "ready")


def status(line: str) -> int:
    """Bytes that the kernel counts for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(text.split()[1]) for text in lines if text.startswith(line)) << 10


def shape(layers: int = 20, width: int = 1024) -> Any:
    import transformers

    return transformers.LlamaConfig(
        vocab_size=16000,
        hidden_size=width,
        intermediate_size=2816 * width // 1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
    )


def save(folder: str, dtype: str, **of: int) -> str:
    """A folder as models are published, in several files."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(shape(**of), dtype=getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size="200MB")
    return folder


def build(how: str, config: Any, folder: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    from forebay.train.pretrained import load_pretrained

    how = how.partition(",")[0]
    if how == "from_pretrained":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if how == "forebay train":
        return load_pretrained(Path(folder), config=config, dtype=torch.bfloat16)
    is_ours = how == "zero.Init"
    context = forebay.zero.Init(config_dict_or_path=CONFIG) if is_ours else None
    with context or contextlib.nullcontext():
        return AutoModelForCausalLM.from_config(config)


def work(folder: str, how: str, saved: str) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as small:  # loads what it needs
        build(how, shape(layers=1, width=64), save(small, "bfloat16", layers=1, width=64))
    before, began = status("VmRSS"), time.monotonic()
    model = build(how, shape(), saved)
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
    torchrun.leave(folder, os.environ["RANK"], found)
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
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, *options.words)
    results: dict[str, dict[str, float]] = {}
    variables = torchrun.environment()
    with tempfile.TemporaryDirectory() as saved:
        for dtype in {*WAYS.values()} - {""}:
            save(f"{saved}/{dtype}", dtype)
        for count in map(int, options.ranks.split(",")):
            for how, dtype in WAYS.items():
                words = (how, f"{saved}/{dtype}")
                of = torchrun.run(__file__, *words, ranks=count, timeout=600, variables=variables)
                fullest = {key: max(one[key] for one in of) for key in of[0]}
                results[f"{how}, {count} ranks"] = fullest
    text = table(results)
    print(text)
    if options.output is not None:
        head = f"`python {' '.join(sys.argv)}`: the fullest rank, a Llama of 290M parameters (553 "
        head += f"MiB in bf16), torch {torch.__version__}.\n\n"
        (options.output / "build-memory-cpu.md").write_text(head + text + "\n")
        (options.output / "build-memory-cpu.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
