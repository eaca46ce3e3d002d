"""The delayed update in plain PyTorch: autograd, whole fp32 masters, one loop, no engine.

The formula of one update, the sum of squares and the factor are those of `forebay.optim`, which
define the bits; when weights change is written here anew.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from forebay.optim.clip import global_norm, gradient_scale
from forebay.optim.loss_scale import DynamicLossScale, LossScaleConfig, StaticLossScale
from forebay.optim.reference import AdamState, round_to, update_
from forebay.optim.rule import AdamRule
from forebay.optim.squares import square_sum
from numerics.training import Trained, inputs, loss_of, optimizer_for, small_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from numerics.training import Recipe

NEVER = 1 << 30


class DelayedTraining:
    """Masters, moments, and the weights that are not in force yet."""

    def __init__(self, model: nn.Module, recipe: Recipe, *, warm_up: int) -> None:
        source = optimizer_for(model)
        self.groups = source.param_groups
        self.params = list(model.parameters())
        self._rule = AdamRule.of(source)
        self._recipe = recipe
        self._warm_up = warm_up
        self._group_of = {id(p): g for g in self.groups for p in g["params"]}
        self.masters = [p.detach().float().clone() for p in self.params]
        self.moments = [(torch.zeros_like(m), torch.zeros_like(m)) for m in self.masters]
        self.steps = [0] * len(self.params)
        self.scale = StaticLossScale()
        if recipe.dtype is torch.float16:
            self.scale = DynamicLossScale(LossScaleConfig(initial_scale_power=20))
        self._coming: dict[int, torch.Tensor] = {}

    def come_into_force(self) -> None:
        """The weights on the device become those that were made last."""
        for i, new in self._coming.items():
            self.params[i].data.copy_(new)
        self._coming = {}

    def step(self, grads: list[torch.Tensor | None]) -> float:
        """One step; returns the norm."""
        squares = [float(square_sum(g.reshape(-1))) for g in grads if g is not None]
        norm = global_norm(squares, divisor=self.scale.value)
        # what the step before has made comes into force now, whatever becomes of this one
        self.come_into_force()
        overflowed = not all(math.isfinite(s) for s in squares)
        if not overflowed:
            divisor = self.scale.value
            factor = gradient_scale(norm, max_norm=self._recipe.clip, divisor=divisor)
            for i, grad in enumerate(grads):
                if grad is not None:
                    self._update(i, grad, factor)
            if max(self.steps) <= self._warm_up:
                self.come_into_force()
        self.scale.update(overflowed=overflowed)
        self._recipe.schedule(self.groups)
        return norm

    def _update(self, i: int, grad: torch.Tensor, factor: float) -> None:
        self.steps[i] += 1
        m, v = self.moments[i]
        update_(
            AdamState(master=self.masters[i], exp_avg=m, exp_avg_sq=v),
            grad=grad,
            scale=factor,
            hyper=self._rule.capture(self._group_of[id(self.params[i])], self.steps[i]),
        )
        self._coming[i] = round_to(self.masters[i], self._recipe.dtype)


def train_delayed(
    recipe: Recipe,
    *,
    warm_up: int = 0,
    build: Callable[[torch.dtype], nn.Module] = small_model,
) -> Trained:
    """Train as `numerics.training.train`; `warm_up=NEVER` is exact training."""
    model = build(recipe.dtype).to(recipe.device)
    training = DelayedTraining(model, recipe, warm_up=warm_up)
    losses, norms = [], []
    for batch in inputs(recipe):
        sums: list[torch.Tensor | None] = [None] * len(training.params)
        for x in batch:
            loss = loss_of(model, x) / recipe.micro
            scaled = loss * training.scale.value
            grads = torch.autograd.grad(scaled, training.params, allow_unused=True)
            losses.append(loss.item())
            for i, grad in enumerate(grads):
                if grad is not None:
                    before = sums[i]
                    sums[i] = grad if before is None else before.float() + grad.float()
        norms.append(training.step(sums))
    training.come_into_force()
    return Trained(
        losses=losses,
        norms=norms,
        weights={name: value.clone().cpu() for name, value in model.state_dict().items()},
        masters=[m.cpu() for m in training.masters],
        moments=[moment.cpu() for pair in training.moments for moment in pair],
        steps=training.steps,
    )
