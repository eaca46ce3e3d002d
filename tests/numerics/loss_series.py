"""Losses and norms of one fixed run, to the bit: a tiny Llama on the CPU in fp32.

Run as a program it prints them as JSON; with `--write` it puts them into `loss_series.json`,
which is done on purpose only, when a change is meant to change the arithmetic.

The environment below makes the kernels the same on every x86-64 processor: MKL in its compatible
mode, torch's vector code at its lowest level, one thread. What is left is torch's version and the
C library's (its exponential, for one), by which the file is keyed.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "default",
    "CUDA_VISIBLE_DEVICES": "",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
}
STEPS = 40
TEXT = ("the water above the dam waits, and the wheel below it turns. " * 40).encode()


def key() -> str:
    """Torch's release, the processor's family and the C library."""
    import torch

    release = torch.__version__.partition("+")[0]
    return f"torch {release}, {platform.machine()}, {' '.join(platform.libc_ver())}"


def series() -> dict[str, list[str]]:
    """Train and return every loss (float32) and norm (float64) in hexadecimal."""
    import torch
    import transformers

    import forebay

    torch.backends.mkldnn.enabled = False
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    source = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    warm_up = torch.optim.lr_scheduler.LambdaLR(source, lambda step: min(1.0, (step + 1) / 8))
    model, optimizer = forebay.offload(model, source, device="cpu", clip_norm=1.0)
    text = torch.tensor(list(TEXT))
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(2):
            start = (97 * (2 * step + micro)) % (len(text) - 4 * 33)
            batch = text[start : start + 4 * 33].view(4, 33)
            loss = model(input_ids=batch[:, :-1], labels=batch[:, :-1]).loss
            (loss / 2).backward()
            losses.append(loss.item().hex())
        optimizer.step()
        optimizer.zero_grad()
        warm_up.step()
        norms.append(optimizer.last_grad_norm.hex())
    optimizer.close()
    return {"losses": losses, "norms": norms}


def main() -> None:
    """Print the series, or write it into the file."""
    os.environ.update(ENVIRONMENT)
    found = {key(): series()}
    if "--write" in sys.argv:
        known = json.loads(FILE.read_text()) if FILE.exists() else {}
        FILE.write_text(json.dumps({**known, **found}, indent=1, sort_keys=True) + "\n")
        return
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
