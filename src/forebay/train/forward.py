"""One forward pass of a causal language model, and the sum of its token losses.

The loss is made here and not by the model, because a mean inside each micro-batch would weigh the
tokens of short micro-batches more than those of long ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from forebay.data.batches import IGNORED

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.data.batches import MicroBatch

__all__ = ["Forward", "forward", "sum_of_token_losses"]


class Forward(NamedTuple):
    """What a forward pass gives.

    Attributes:
        loss_sum: Sum of the losses of all label tokens, a float32 scalar.
        router_loss: A mixture of experts' own loss, weighted as its configuration says, or None.
    """

    loss_sum: torch.Tensor
    router_loss: torch.Tensor | None


def forward(
    model: Callable[..., Any], batch: MicroBatch, *, device: torch.device, router_weight: float
) -> Forward:
    """Run a model on a micro-batch.

    Args:
        model: A causal language model, or an engine around one.
        batch: On the host; copied to the device.
        device: Where the model computes.
        router_weight: Weight of the auxiliary loss, where the model returns one.
    """
    mask = batch.attention_mask
    outputs = model(
        input_ids=batch.input_ids.to(device, non_blocking=True),
        attention_mask=None if mask is None else mask.to(device, non_blocking=True),
        use_cache=False,
    )
    router = getattr(outputs, "aux_loss", None)
    return Forward(
        loss_sum=sum_of_token_losses(outputs.logits, batch.labels.to(device, non_blocking=True)),
        router_loss=None if router is None else router_weight * router.to(device),
    )


def sum_of_token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every label with the prediction one position before it, added up.

    Args:
        logits: [rows, length, vocabulary]; 16-bit ones are computed on in float32.
        labels: int64 [rows, length], `IGNORED` where nothing is learned.

    Returns:
        A scalar, float32 (float64 for float64 logits).
    """
    # The labels move and not the logits: a slice of the logits would be copied whole.
    targets = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    scores = logits.reshape(-1, logits.shape[-1])
    return functional.cross_entropy(
        scores.float() if scores.element_size() < 4 else scores,
        targets.reshape(-1),
        ignore_index=IGNORED,
        reduction="sum",
    )
