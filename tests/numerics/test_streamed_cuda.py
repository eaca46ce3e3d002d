"""On a GPU: weights on the host leave the device's memory free, and the bits are the same."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from forebay.engine import EngineOptions, offload_with
from forebay.engine.options import ActivationPlace, Timing
from forebay.plan import UpdatePlace, WeightPlace
from forebay.tiers.ledger import Tier

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BLOCKS, WIDTH = 24, 4096
BLOCK_BYTES = 2 * WIDTH * WIDTH
ROWS = 64
RESIDENT = EngineOptions(update=UpdatePlace.DEVICE, timing=Timing.SYNCHRONOUS)
AWAY = EngineOptions(
    weights=WeightPlace.HOST, update=UpdatePlace.HOST, pool_bytes=4 * (BLOCK_BYTES + 1024)
)
PLACES = {
    "host": AWAY,
    "state_streamed": replace(AWAY, update=UpdatePlace.STREAMED, staging_bytes=12 * BLOCK_BYTES),
    "activations": replace(AWAY, activations=ActivationPlace.HOST),
    "least": replace(AWAY, pool_bytes=0),
}


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(checkpoint(block, x, use_reentrant=False))
        return x


def _train(options: EngineOptions):
    torch.use_deterministic_algorithms(True)
    try:
        model = _Deep().to(torch.bfloat16)
        source = torch.optim.AdamW(model.parameters(), lr=1e-3)
        options = replace(options, device="cuda", clip_norm=1.0)
        _, optimizer = offload_with(model, source, options=options)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        losses = []
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(ROWS, WIDTH, generator=generator).to("cuda", torch.bfloat16)
            loss = model(x).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        peak = torch.cuda.max_memory_allocated()
        state = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        ledger = optimizer.engine.ledger
        ledger.check()
        placed = ledger.peak_bytes(Tier.DEVICE)
        pool = optimizer.engine.streaming.residency.pool
        rate = 1 - pool.late / max(pool.uses, 1)
        optimizer.close()
        return losses, state, peak, placed, rate
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("place", PLACES)
def test_same_bits_in_a_fraction_of_the_memory(place):
    expected, state, whole, _, _ = _train(RESIDENT)
    losses, found, peak, placed, rate = _train(PLACES[place])
    assert losses == expected
    assert all(torch.equal(found[name], value) for name, value in state.items())
    # What forebay placed, the gradients that wait for the link, and small activations.
    assert peak <= placed + 4 * BLOCK_BYTES + (64 << 20)
    if place != "state_streamed":
        assert peak < BLOCKS * BLOCK_BYTES / 2
    assert peak < whole
    assert rate > 0.9, "all but the first pass's order is known"
