"""Plain PyTorch training with fp32 masters, as one would write it without forebay.

Working weights in the model's dtype, masters in fp32, gradients cast and unscaled, torch's own
clipping and Adam on the masters, working weights rounded from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn


@dataclass
class Clipping:
    """What one step clipped: torch's factor, and the gradients that it saw."""

    factor: float
    grads: list[torch.Tensor | None]


class PlainTraining:
    """One model's masters and their optimizer.

    Args:
        model: Its parameters get new values after every step.
        groups: Parameter groups over the model's own parameters.
        adam: `torch.optim.Adam` or `AdamW`.
        clip: Bound on the global norm; None does not clip.
        loss_scale: What gradients are too large by.
        defaults: Options of the optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[dict[str, Any]],
        *,
        adam: type[torch.optim.Optimizer] = torch.optim.AdamW,
        clip: float | None = None,
        loss_scale: float = 1.0,
        **defaults: Any,
    ) -> None:
        self.params = list(model.parameters())
        masters = {id(p): p.detach().to(torch.float32, copy=True) for p in self.params}
        self.masters = [masters[id(p)].requires_grad_() for p in self.params]
        own = [{**g, "params": [masters[id(p)] for p in g["params"]]} for g in groups]
        self.optimizer = adam(own, foreach=False, **defaults)
        self._clip = clip
        self._loss_scale = loss_scale

    def step(self) -> Clipping:
        """Update with the gradients in the model's parameters and clear them."""
        grads = [None if p.grad is None else p.grad.clone() for p in self.params]
        for param, master in zip(self.params, self.masters, strict=True):
            # a power of two: exact
            master.grad = None if param.grad is None else param.grad.float() / self._loss_scale
            param.grad = None
        factor = 1.0
        if self._clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.masters, self._clip, foreach=False)
            # as torch/nn/utils/clip_grad.py computes it, in float32
            factor = float(torch.clamp(self._clip / (norm + 1e-6), max=1.0))
        self.optimizer.step()
        self.publish()
        return Clipping(factor, grads)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the working weights."""
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)

    @torch.no_grad()
    def disturb(self, relative: float, *, lr: float, generator: torch.Generator) -> None:
        """Move every master by up to `relative` times its size plus the learning rate."""
        for master in self.masters:
            sign = torch.rand(master.shape, generator=generator).to(master.device) * 2 - 1
            master.add_(sign * relative * (master.abs() + lr))
        self.publish()
