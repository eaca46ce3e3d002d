"""A model on the meta device takes its size once while it is read, not twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch
from safetensors.torch import save_file

WIDTH, LAYERS = 1024, 40
WEIGHTS = 2 * WIDTH * WIDTH * LAYERS

_SCRIPT = """
import json, sys
import torch
from torch import nn
import forebay
from forebay.tiers.ledger import Tier
from numerics.memory_run import reset_peak, status_bytes

def build(layers, width):
    stack = [nn.Linear(width, width, bias=False) for _ in range(layers)]
    return nn.Sequential(*stack).bfloat16()

def take(model):
    source = torch.optim.AdamW(model.parameters())
    return forebay.offload(model, source, device="cpu", parameters="host")[1]

def step(model, optimizer, width):
    model(torch.ones(1, width, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.close()

small = build(2, 64)
step(small, take(small), 64)
layers, width, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with torch.device("meta"):
    model = build(layers, width)
forebay.zero.weights_from(model, folder)
before = status_bytes("VmRSS")
reset_peak()
optimizer = take(model)
print(json.dumps({
    "peak": status_bytes("VmHWM") - before,
    "after": status_bytes("VmRSS") - before,
    "device": optimizer.engine.ledger.bytes(Tier.DEVICE),
    "right": bool((model[3].weight == 3.0).all()),
}))
"""


def test_the_peak_is_the_model_and_a_parameter(tmp_path):
    for half in range(2):
        names = range(half * LAYERS // 2, (half + 1) * LAYERS // 2)
        state = {
            f"{n}.weight": torch.full((WIDTH, WIDTH), float(n), dtype=torch.bfloat16) for n in names
        }
        save_file(state, tmp_path / f"model-{half}.safetensors")
    command = [sys.executable, "-c", _SCRIPT, str(LAYERS), str(WIDTH), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["right"]
    # huge pages of 2 MiB may reach into the masters' low halves behind the weights
    assert WEIGHTS * 0.95 < found["after"] < WEIGHTS + LAYERS * (1 << 20) + (8 << 20)
    # the largest parameter as read and as written, and the heap's slack
    assert found["peak"] - found["after"] < 2 * (2 * WIDTH * WIDTH) + (8 << 20)
