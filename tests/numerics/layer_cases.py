"""Training in layer order, and one micro-batch after the other, to be compared."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from forebay.engine import EngineOptions, offload_with
from forebay.engine.layer_order import LayerOrder
from forebay.plan.placement import AccumulationOrder
from forebay.plan.program import Lane
from numerics.real_models import DEVICE, Job, build, finished, groups_of, loss_of, tokens

LAYER = AccumulationOrder.LAYER


def by_layers(job: Job, options: EngineOptions, around=torch.enable_grad):
    """Train a real model in layer order."""
    model = build(job)
    source = torch.optim.AdamW(groups_of(model, job), lr=job.lr)
    options = replace(options, device=DEVICE, clip_norm=job.clip, backwards=job.micro, order=LAYER)
    model, optimizer = offload_with(model, source, options=options)
    layers, losses, norms = LayerOrder(optimizer.engine), [], []
    for step in range(job.steps):

        def _share(micro: int, step: int = step) -> torch.Tensor:
            with around():
                loss = loss_of(model, tokens(step, micro))
            losses.append(loss.item())
            return loss / job.micro

        layers.backward([partial(_share, micro) for micro in range(job.micro)])
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.last_grad_norm)
    return finished(model, optimizer, losses, norms)


def train(model, *, options: EngineOptions, micro: int = 3, clip: float = 1.0, look=None):
    """Weights after three updates, in either order, and bytes up in each.

    `look` is called with the engine at the end.
    """
    source = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = replace(options, device=DEVICE, clip_norm=clip, backwards=micro)
    model, optimizer = offload_with(model, source, options=options)
    engine, up = optimizer.engine, []
    layers = LayerOrder(engine) if options.order is LAYER else None
    for step in range(3):
        before = engine.traffic[Lane.UP]

        def _share(number: int, step: int = step) -> torch.Tensor:
            generator = torch.Generator().manual_seed(100 * step + number)
            x = torch.randn(4, 8, generator=generator).to(DEVICE, next(model.parameters()).dtype)
            return model(x).float().square().mean() / micro

        if layers is not None:
            layers.backward([partial(_share, number) for number in range(micro)])
        else:
            for number in range(micro):
                _share(number).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.synchronize()
        up.append(engine.traffic[Lane.UP] - before)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    norm = optimizer.last_grad_norm
    if look is not None:
        look(engine)
    optimizer.close()
    return weights, norm, up
