"""A training script written for DeepSpeed, run by forebay: only the import differs.

It takes DeepSpeed's arguments, reads a DeepSpeed configuration, and trains a small Llama on text
that it makes up. The configuration offloads the optimizer state to host memory and accumulates
two micro-batches per update.

    python examples/deepspeed_script.py
    python examples/deepspeed_script.py --deepspeed --deepspeed_config ds.json
"""

from __future__ import annotations

import argparse
import random

import torch
import transformers

import forebay as deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 10, "total_num_steps": 100},
    },
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
}


class Sums(torch.utils.data.Dataset):
    """Rows like "17+25=42;": bytes of sums that follow one another, all of them right."""

    def __init__(self, rows, *, seed=0):
        source = random.Random(seed)
        self._rows = [self._row(source) for _ in range(rows)]

    @staticmethod
    def _row(source):
        line = ""
        while len(line) < 48:
            first, second = source.randrange(10), source.randrange(10)
            line += f"{first}+{second}={first + second};"
        return torch.tensor(list(line[:48].encode()))

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return self._rows[index]


def main(arguments=None):
    """Train and return the mean loss of the first and of the last updates."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="updates")
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args(arguments)
    deepspeed.init_distributed()

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        )
    )
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=model,
        training_data=Sums(4096),
        config=None if args.deepspeed_config else CONFIG,
    )
    losses = []
    while engine.global_steps < args.steps:
        for batch in loader:
            rows = batch.to(engine.device)
            loss = engine(input_ids=rows, labels=rows).loss
            engine.backward(loss)
            is_update = engine.is_gradient_accumulation_boundary()
            engine.step()
            losses.append(loss.item())
            if is_update and engine.global_steps % 20 == 0:
                print(
                    f"update {engine.global_steps:4}  loss {losses[-1]:.4f}  "
                    f"lr {engine.get_lr()[0]:.2e}  norm {engine.get_global_grad_norm():.3f}"
                )
            if engine.global_steps >= args.steps:
                break
    for tier, role, nbytes in engine.ledger.table():
        print(f"{tier.value:8} {role.value:24} {nbytes:12,} bytes")
    engine.close()
    part = max(1, len(losses) // 10)
    first, last = sum(losses[:part]) / part, sum(losses[-part:]) / part
    print(f"mean loss of the first tenth {first:.4f}, of the last {last:.4f}")
    return first, last


if __name__ == "__main__":
    main()
