"""Law 1, written down: gradients of each rank, fp32 sums in rank order, one norm, one update."""

from __future__ import annotations

import torch

from distributed import training
from distributed.training import Recipe, model_of, windows
from forebay.optim.clip import global_norm, gradient_scale
from forebay.optim.master import split
from forebay.optim.reference import AdamState, update_
from forebay.optim.rule import AdamRule
from forebay.optim.squares import square_sum


def by_definition(recipe: Recipe, *, size: int) -> tuple[list[float], str]:
    """Norms, and a digest of the weights; one backward per update."""
    model = model_of(recipe.dtype)
    params = list(model.parameters())
    decayed = [p for p in params if p.ndim > 1]
    rule = AdamRule.of(torch.optim.AdamW(params, lr=1e-2))
    states = []
    for param in params:
        high, low = split(param.detach().float().reshape(-1))
        moments = (torch.zeros_like(high, dtype=torch.float32) for _ in range(2))
        states.append(
            AdamState(master=high, low=low, exp_avg=next(moments), exp_avg_sq=next(moments))
        )
    inputs = [windows(recipe, rank=rank) for rank in range(size)]
    norms = []
    for step in range(recipe.steps):
        sums = [None] * len(params)
        for rank in range(size):
            model.zero_grad()
            training.loss_of(model, inputs[rank][step][0], recipe).backward()
            for n, param in enumerate(params):
                if param.grad is not None:
                    mine = param.grad.float()
                    sums[n] = mine.clone() if sums[n] is None else sums[n] + mine
        norm = global_norm([float(square_sum(s)) for s in sums if s is not None], divisor=size)
        norms.append(norm)
        scale = gradient_scale(norm, max_norm=recipe.clip, divisor=size)
        for param, state, grad in zip(params, states, sums, strict=True):
            if grad is None:
                continue
            group = {"weight_decay": 0.1, "lr": 1e-2}
            if not any(param is p for p in decayed):
                group = {"weight_decay": 1e-2, "lr": 3e-3}
            hyper = rule.capture({"betas": (0.9, 0.999), "eps": 1e-8, **group}, step + 1)
            update_(state, grad=grad.reshape(-1), scale=scale, hyper=hyper)
            param.data = state.master.view(param.shape).clone()
    return norms, training.digest(list(model.state_dict().values()))
