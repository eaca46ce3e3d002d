"""The loop of reinforcement learning: train a little, generate a little, on one device.

While it generates, optimizer state and masters leave the device, so that a server of the model (or
a long cache of keys and values) has their room. It prints the seconds that a round trip takes and
the GiB that it frees. The model is small and the text is made up; the reward is how often a
generated line is a right sum, and what was right is trained on.

    python examples/train_then_generate.py
"""

from __future__ import annotations

import argparse
import time

import torch
import transformers

import forebay
from forebay import OffloadStateTypeEnum as State

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 2},
}
# Weights stay: they generate.
LEAVE = [State.optim_states, State.hp_params, State.lp_grads, State.contiguous_grad_buffer]


def right_sums(count, *, seed):
    """Rows like "3+4=07;", as bytes."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(0, 10, (count, 2), generator=generator).tolist()
    return torch.tensor([list(f"{a}+{b}={a + b:02};".encode()) for a, b in pairs])


def is_right(row):
    """Whether a generated row is a right sum."""
    text = bytes(row.tolist()).decode(errors="replace")
    return text == f"{text[0]}+{text[2]}={int(text[0]) + int(text[2]):02};"


def main(arguments=None):
    """Train and generate in turns; returns the share of right sums of each round."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60, help="updates in a round")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16,
            eos_token_id=None,
        )
    )
    engine, *_ = forebay.initialize(model=model, config=CONFIG)
    rows, shares = right_sums(64, seed=0), []
    for number in range(args.rounds):
        engine.train()
        for _ in range(args.steps):
            batch = rows[torch.randint(0, len(rows), (8,))].to(engine.device)
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
        begin = time.perf_counter()
        freed = engine.offload_states(include=LEAVE).device_bytes
        away = time.perf_counter() - begin
        engine.eval()
        prompts = right_sums(32, seed=100 + number)[:, :4].to(engine.device)
        with torch.no_grad():
            made = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=3, do_sample=False
            ).cpu()
        begin = time.perf_counter()
        engine.reload_states()
        back = time.perf_counter() - begin
        right = torch.tensor([is_right(row) for row in made])
        rows = torch.cat([rows, made[right]])
        shares.append(float(right.float().mean()))
        print(
            f"round {number}: {shares[-1]:.0%} right, freed {freed / 2**30:.4f} GiB while it "
            f"generated, {away:.3f} s away and {back:.3f} s back"
        )
    engine.close()
    return shares


if __name__ == "__main__":
    main()
