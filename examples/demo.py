"""Trains a small byte-level Llama on this machine's Python library, with state on the host.

What it shows, in about three minutes on two cores without a GPU:

1. `forebay train` from a DeepSpeed configuration: the resolved configuration, bytes by tier and
   role, progress, and an evaluation loss below what a model of byte pairs can reach;
2. the same losses, bit for bit, with the optimizer state on the host and on the device;
3. a sample, from the saved folder and transformers alone.

    python examples/demo.py --output runs/demo
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import time
from pathlib import Path

from forebay.cli.main import main as forebay
from forebay.data import (
    ByteTokenizer,
    Layout,
    build_store,
    byte_entropy,
    open_files,
    plan_rows,
    split_rows,
)
from forebay.data.entropy import ByteEntropy

SEQUENCE_LENGTH = 256
SEED = 0
EVAL_FRACTION = 0.01

# 1.3M parameters: 32 numbers a head, five heads, four blocks.
MODEL = {
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "intermediate_size": 448,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
    },
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


def main() -> int:
    arguments = _arguments()
    folder = arguments.output
    began = time.monotonic()
    inputs = write_inputs(folder)
    _title(f"training for {arguments.steps} updates, optimizer state on the host")
    code = run(inputs, folder / "train", steps=arguments.steps, fraction=EVAL_FRACTION)
    if code:
        return code
    summary = json.loads((folder / "train" / "summary.json").read_text())
    _title("against the text itself")
    learned = beats_byte_pairs(summary["eval_losses"][-1]["loss"], held_out_entropy(inputs))
    _title(f"{arguments.compared} updates, state on the host and on the device")
    same = same_losses(inputs, folder, steps=arguments.compared)
    _title("a sample, from the saved folder through transformers")
    print(sample(Path(summary["model"]), tokens=arguments.tokens))
    _title(f"{time.monotonic() - began:.0f} s in all")
    return 0 if learned and same else 1


def write_inputs(folder: Path) -> Path:
    """Writes model.json, deepspeed.json and library.jsonl; returns their folder."""
    inputs = folder / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    (inputs / "model.json").write_text(json.dumps(MODEL, indent=2))
    (inputs / "deepspeed.json").write_text(json.dumps(CONFIG, indent=2))
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(library.glob("*.py")):
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
    if sum(map(len, texts)) < 1_000_000:
        sys.exit(f"error: {library} holds no source text\nhint: use a Python with its library")
    with (inputs / "library.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return inputs


def run(inputs: Path, output: Path, *, steps: int, fraction: float, settings: str = "") -> int:
    """Runs `forebay train` in this process; returns its exit code."""
    words = ["train", "--model", str(inputs / "model.json")]
    words += ["--data", str(inputs / "library.jsonl"), "--config", str(inputs / "deepspeed.json")]
    words += ["--output", str(output), "--overwrite", "--seed", str(SEED)]
    words += ["--sequence-length", str(SEQUENCE_LENGTH), "--steps", str(steps)]
    words += ["--eval-fraction", str(fraction)]
    if settings:
        words += ["--set", settings, "--quiet"]
    return forebay(words)


def held_out_entropy(inputs: Path) -> ByteEntropy:
    """Entropy of the text that the run evaluates on: the same rows, found by the same seed."""
    store = build_store(open_files([inputs / "library.jsonl"]), ByteTokenizer())
    rows = plan_rows(store, layout=Layout.CUT, length=SEQUENCE_LENGTH)
    held_out = split_rows(rows, fraction=EVAL_FRACTION, seed=SEED).held_out
    stretches = zip(held_out.starts, held_out.stops, strict=True)
    ids = [int(token) for start, stop in stretches for token in store.ids[start:stop]]
    return byte_entropy(bytes(token for token in ids if token < 256))


def beats_byte_pairs(loss: float, entropy: ByteEntropy) -> bool:
    """Prints the loss beside what simpler models can reach; True when it is lower."""
    print(f"unigram entropy        {entropy.unigram:.3f} nats per byte")
    print(f"order-1 entropy        {entropy.order1:.3f}")
    print(f"evaluation loss        {loss:.3f}")
    if loss < entropy.order1:
        return True
    print("error: the model is no better than a table of byte pairs", file=sys.stderr)
    return False


def same_losses(inputs: Path, folder: Path, *, steps: int) -> bool:
    """Trains twice, with and without offload, and compares every loss bit by bit."""
    series = {}
    for device in ("cpu", "none"):
        setting = f"zero_optimization.offload_optimizer.device={device}"
        output = folder / f"offload-{device}"
        if run(inputs, output, steps=steps, fraction=0.0, settings=setting):
            return False
        lines = (output / "metrics.jsonl").read_text().splitlines()
        series[device] = [json.loads(line)["loss"] for line in lines]
    for step, (host, device) in enumerate(zip(*series.values(), strict=True), start=1):
        print(f"step {step:3}   host {host.hex()}   device {device.hex()}   {host:.4f}")
    if series["cpu"] == series["none"]:
        print("the same, bit for bit")
        return True
    print("error: the losses differ", file=sys.stderr)
    return False


def sample(model_folder: Path, *, tokens: int) -> str:
    """Generates text with transformers, from the folder that the run saved."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    torch.manual_seed(SEED)
    prompt = tokenizer("def ", return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=tokens, do_sample=True, temperature=0.7, top_k=40)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small model on the Python library.")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"))
    parser.add_argument("--steps", type=int, default=500, help="updates of the main run")
    parser.add_argument("--compared", type=int, default=12, help="updates of the two short runs")
    parser.add_argument("--tokens", type=int, default=500, help="length of the sample")
    return parser.parse_args()


def _title(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
