"""The same training step with forebay and without offload, in turn, in one run.

    python benchmarks/step.py --size 3b --variants floor,none,host --steps 8

Each variant trains the same randomly initialised Llama shape on the same random tokens in a
process of its own and prints one line `RESULT {json}`: seconds per step (median after two
warm-up steps, and all of them), tokens per second, peak device memory (allocated and reserved),
peak host memory, losses.

Variants: `floor` (forward and backward alone), `none` (bf16 weights, fp32 masters and moments on
the device, plain PyTorch), `planned` (forebay, state in host memory, places as planned),
`host` (all updates on the host), `host_sync` (planned, not deferred), `device` (forebay, state on
the device), `mix+R+S` (the first share R of the parameters resident on the device, the next share
S streamed, the rest on the host).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

# hidden, layers, heads, key/value heads, feed-forward, vocabulary, tied
SHAPES = {
    "tiny": (256, 4, 4, 4, 1024, 32000, True),
    "1b": (2048, 16, 32, 8, 8192, 128256, True),
    "3b": (3072, 28, 24, 8, 8192, 128256, True),
    "7b": (4096, 32, 32, 32, 11008, 32000, False),
}


def build_model(size, device):
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads, kv_heads, feed_forward, vocab, tied = SHAPES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=feed_forward,
        vocab_size=vocab,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


class Plain:
    """No offload: bf16 weights, fp32 masters and moments on the device."""

    def __init__(self, model, clip):
        self.params = list(model.parameters())
        self.masters = [p.detach().float() for p in self.params]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-5, fused=True)
        self.clip = clip

    def step(self):
        torch.nn.utils.clip_grad_norm_(self.params, self.clip)
        for master, param in zip(self.masters, self.params, strict=True):
            master.grad, param.grad = param.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            for master, param in zip(self.masters, self.params, strict=True):
                param.copy_(master)
                master.grad = None


class Floor:
    """Forward and backward alone."""

    def __init__(self, model):
        self.model = model

    def step(self):
        self.model.zero_grad(set_to_none=True)


class Forebay:
    """forebay in exact mode."""

    def __init__(self, model, variant, args):
        from forebay.engine import EngineOptions, offload_with
        from forebay.engine.options import Timing
        from forebay.plan import UpdatePlace

        source = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01)
        name, _, numbers = variant.partition("+")
        resident, streamed = (
            ([float(n) for n in numbers.split("+")] + [0.0, 0.0])[:2] if (numbers) else (0.0, 0.0)
        )

        def places(spec):
            chosen, total, used = [], sum(u.elements for u in spec.units), 0
            for unit in spec.units:
                used += unit.elements
                if used <= resident * total:
                    chosen.append(UpdatePlace.DEVICE)
                elif used <= (resident + streamed) * total:
                    chosen.append(UpdatePlace.STREAMED)
                else:
                    chosen.append(UpdatePlace.HOST)
            return chosen

        options = EngineOptions(
            clip_norm=args.clip,
            update={"device": UpdatePlace.DEVICE, "host": UpdatePlace.HOST}.get(variant),
            places=places if name == "mix" else None,
            timing=Timing.SYNCHRONOUS if variant == "host_sync" else Timing.DEFERRED,
            backwards=args.accum,
            threads=args.threads,
            host_budget=120 << 30,
        )
        _, self.optimizer = offload_with(model, source, options=options)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def run_variant(variant, args):
    started = time.time()
    model = build_model(args.size, args.device)
    num_params = sum(p.numel() for p in model.parameters())
    if variant == "floor":
        engine = Floor(model)
    elif variant == "none":
        engine = Plain(model, args.clip)
    else:
        engine = Forebay(model, variant, args)
    generator = torch.Generator().manual_seed(1)
    vocab = SHAPES[args.size][5]
    batches = [
        torch.randint(0, vocab, (args.mbs, args.seq), generator=generator).to(args.device)
        for _ in range(2)
    ]
    setup = time.time() - started
    cuda = args.device == "cuda"
    sync = torch.cuda.synchronize if cuda else (lambda: None)
    times, losses, phases = [], [], []
    for step in range(args.steps):
        sync()
        begin = time.time()
        marks = []
        for micro in range(args.accum):
            batch = batches[(step + micro) % 2]
            loss = model(input_ids=batch, labels=batch).loss / args.accum
            marks.append(time.time() - begin)
            loss.backward()
            marks.append(time.time() - begin)
        engine.step()
        marks.append(time.time() - begin)
        # the next forward belongs to the next step: no synchronisation but the loop's own
        losses.append(loss.detach())
        if not args.overlap:
            sync()
        times.append(time.time() - begin)
        phases.append([round(m, 3) for m in marks])
    sync()
    result = {
        "variant": variant,
        "size": args.size,
        "tokens": args.mbs * args.seq * args.accum,
        "params": num_params,
        "step_s": round(statistics.median(times[2:]), 4),
        "all": [round(t, 3) for t in times],
        "phases": phases[-1],
        "tok_s": round(args.mbs * args.seq * args.accum / statistics.median(times[2:])),
        "setup_s": round(setup, 1),
        "losses": [round(float(value), 5) for value in losses],
        "rss_peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 1),
    }
    if cuda:
        result["device_peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        result["device_reserved_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)
    print("RESULT " + json.dumps(result), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--variants", default="floor,none,host")
    parser.add_argument("--size", default="3b", choices=SHAPES)
    parser.add_argument("--mbs", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--overlap", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_variant(args.one, args)
        return
    for variant in args.variants.split(","):
        command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--one", variant]
        subprocess.run(command, check=False, env=os.environ.copy())


if __name__ == "__main__":
    main()
