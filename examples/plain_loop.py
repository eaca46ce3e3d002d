"""Trains a small Llama in a plain PyTorch loop, with its optimizer state in host memory.

Two lines differ from a loop without forebay: the call of `forebay.offload`, and that clipping is
asked for there. The text is made up here, so nothing is downloaded; on two cores it takes some
ten seconds.

    python examples/plain_loop.py
    python examples/plain_loop.py --steps 300 --device cuda
"""

from __future__ import annotations

import argparse
import random

import torch
import transformers

import forebay

SHAPE = {
    "vocab_size": 256,  # bytes
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
ROWS, LENGTH = 8, 64


def sentences(count, *, seed=0):
    """A little world in which every sentence makes sense, as bytes."""
    choose = random.Random(seed).choice
    lines = [
        f"the {choose(['miller', 'heron', 'otter', 'mason'])} "
        f"{choose(['waits at', 'looks into', 'walks along', 'sings to'])} "
        f"the {choose(['river', 'wheel', 'weir', 'pond'])}."
        for _ in range(count)
    ]
    return torch.tensor(list(" ".join(lines).encode()))


def batch(text, generator, device):
    """Rows of text from random places."""
    starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=generator).tolist()
    return torch.stack([text[start : start + LENGTH] for start in starts]).to(device)


def evaluate(model, text, device):
    """The loss on text that was not trained on; it reads the newest weights, by itself."""
    model.eval()
    with torch.no_grad():
        rows = batch(text, torch.Generator().manual_seed(1), device)
        loss = model(input_ids=rows, labels=rows).loss.item()
    model.train()
    return loss


def main(arguments=None):
    """Train, evaluate, and say where the bytes were."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=chosen.steps)

    model, optimizer = forebay.offload(model, optimizer, device=chosen.device, clip_norm=1.0)

    text, unseen = sentences(2000), sentences(200, seed=1)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, chosen.steps + 1):
        rows = batch(text, generator, chosen.device)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % max(1, chosen.steps // 5) == 0:
            unseen_loss = evaluate(model, unseen, chosen.device)
            print(
                f"step {step:4}  loss {loss.item():.4f}  unseen {unseen_loss:.4f}  "
                f"norm {optimizer.last_grad_norm:.3f}"
            )
    for tier, role, nbytes in optimizer.engine.ledger.table():
        print(f"{tier.value:8} {role.value:24} {nbytes:12,} bytes")

    prompt = torch.tensor([list(b"the otter ")], device=chosen.device)
    sample = model.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)
    print(bytes(sample[0].tolist()).decode(errors="replace"))
    optimizer.close()
    return unseen_loss


if __name__ == "__main__":
    main()
