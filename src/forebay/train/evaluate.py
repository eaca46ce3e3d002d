"""The loss on rows that are not trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay.train.forward import forward

if TYPE_CHECKING:
    from forebay.data.batches import Batches
    from forebay.train.loop import Engine

__all__ = ["evaluate"]


def evaluate(engine: Engine, batches: Batches, *, device: torch.device) -> float:
    """Mean loss per label token over all rows, in evaluation mode.

    Legal between any two updates: each block waits for its own weights alone. The training mode
    is back afterwards.

    Args:
        engine: Whose model is evaluated.
        batches: The rows, each read once and in order.
        device: Where the model computes.

    Returns:
        The mean in nats, added up in double precision.
    """
    total, tokens = 0.0, 0
    engine.eval()
    try:
        with torch.no_grad():
            for batch, counts in batches.in_order():
                result = forward(engine, batch, device=device, router_weight=0.0)
                total += float(result.loss_sum) * counts
                tokens += batch.label_tokens * counts
    finally:
        engine.train()
    return engine.mean_over_ranks(total) / engine.mean_over_ranks(tokens)
