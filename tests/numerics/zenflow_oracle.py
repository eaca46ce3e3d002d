"""ZenFlow in plain PyTorch: whole tensors on one device, one loop, nothing asynchronous.

Written from the algorithm and from forebay's definitions of norm, clip factor and update formula
(`docs/exactness.md`), without the engine: autograd's own gradients, masks instead of compact
copies, and weights that come into force by assignment.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from forebay.optim.clip import global_norm, gradient_scale
from forebay.optim.loss_scale import DynamicLossScale, LossScaleConfig
from forebay.optim.reference import AdamState, round_to, update_
from forebay.optim.rule import AdamRule, float32
from forebay.optim.squares import square_sum
from numerics.training import Recipe, Trained, inputs, loss_of, optimizer_for, small_model


class _Param:
    """One parameter: fp32 state, what is gathered, and which elements are important."""

    def __init__(self, param, group, rule):
        self.param, self.group, self.rule = param, group, rule
        self.master = param.detach().float().reshape(-1).clone()
        self.m, self.v = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.steps = 0
        self.gathered, self.count = torch.zeros_like(self.master), 0
        self.hidden = False
        self.important = None
        # (start, elements) of every rank's slice; one that is the whole without
        self.slices = ()
        self.rest_norm = self.important_norm = 0.0

    def addends(self, grads):
        """One addend in its own dtype, several summed in fp32 in order."""
        total = grads[0]
        for grad in grads[1:]:
            total = total.float() + grad.float()
        return total.reshape(-1)

    def select(self, grad, ratio):
        """The columns with the largest sums of squares, in each rank's slice."""
        self.important = torch.ones_like(self.master, dtype=torch.bool)
        if self.param.ndim < 2:
            return
        self.columns = columns = math.prod(self.param.shape[1:])
        self.kept = min(columns, max(1, int(ratio * columns)))
        for start, elements in self.slices or [(0, self.master.numel())]:
            here = slice(start, start + elements)
            squares = torch.zeros(-(-(start % columns + elements) // columns) * columns).double()
            squares[start % columns : start % columns + elements] = grad[here].cpu().double() ** 2
            sums = torch.zeros(columns, dtype=torch.float64)
            for block in squares.view(-1, columns).split(256):
                tree = torch.cat([block, block.new_zeros(256 - len(block), columns)])
                while len(tree) > 1:
                    tree = tree[: len(tree) // 2] + tree[len(tree) // 2 :]
                sums = sums + tree[0]
            order = sorted(range(columns), key=lambda c, of=sums: (-of[c].item(), c))
            chosen = torch.zeros(columns, dtype=torch.bool)
            chosen[order[: self.kept]] = True
            which = torch.arange(start, start + elements) % columns
            self.important[here] = chosen[which].to(grad.device)

    def update(self, where, grad, scale):
        """One Adam step of the elements in `where`, which is all or a mask."""
        hyper = self.rule.capture(self.group, self.steps)
        own = [value[where].clone() for value in (self.master, self.m, self.v)]
        state = AdamState(master=own[0], exp_avg=own[1], exp_avg_sq=own[2])
        update_(state, grad=grad[where], scale=scale, hyper=hyper)
        for value, new in zip((self.master, self.m, self.v), own, strict=True):
            value[where] = new

    @torch.no_grad()
    def show(self, where):
        """Masters come into force as weights."""
        weights = self.param.view(-1)
        weights[where] = round_to(self.master[where], self.param.dtype)


class Oracle:
    """Trains as `forebay.plan.zenflow.ZenFlow` says."""

    def __init__(self, settings, *, clip, source, rule):
        self.settings, self.clip = settings, clip
        self.params = [
            _Param(param, group, rule) for group in source.param_groups for param in group["params"]
        ]
        self.step_count = 0
        self.interval = 0
        self.pending = None
        self.wanted = set()

    def step(self, grads, *, loss_scale):
        """Apply one window's gradients, by parameter in model order; returns norm and whether."""
        sums = [None if grad is None else square_sum(grad).item() for grad in grads]
        norm = global_norm([s for s in sums if s is not None], divisor=loss_scale)
        if not math.isfinite(norm):
            return norm, False
        scale = gradient_scale(norm, max_norm=self.clip, divisor=loss_scale)
        self.step_count += 1
        step, settings = self.step_count, self.settings
        present = [
            (p, g) for p, g in zip(self.params_in_order, grads, strict=True) if g is not None
        ]
        for p, _ in present:
            p.steps += 1
        everything = slice(None)
        if settings.warms_up(step):
            for p, grad in present:
                p.update(everything, grad, scale)
                p.show(everything)
            return norm, True
        if settings.selects(step):
            self._put_in_force()
            self.wanted = set(map(id, self.params))
        for p, grad in present:
            if p.important is None or id(p) in self.wanted:
                p.select(grad, settings.topk_ratio)
                self.wanted.discard(id(p))
            p.update(p.important, grad, scale)
            p.show(p.important)
            if not p.important.all():
                term = grad.float() * torch.tensor(scale, device=grad.device)
                p.gathered = p.gathered + term if p.count else term
                p.count += 1
                self._note_norms(p, grad, scale)
        self.interval += 1
        if settings.updates_rest(step) or self._is_ripe(present):
            self._update_rest()
        return norm, True

    def _note_norms(self, p, grad, scale):
        total, important = square_sum(grad).item(), square_sum(grad[p.important]).item()
        rest = max(0.0, total - important) / (p.columns - p.kept)
        p.rest_norm += abs(scale) * math.sqrt(rest)
        p.important_norm += abs(scale) * math.sqrt(important / p.kept)

    def _is_ripe(self, present):
        if self.settings.update_every is not None:
            return False
        seen = [p for p in self.params if p.count]
        ripe = [p for p in seen if p.rest_norm >= p.important_norm / self.interval]
        return bool(seen) and len(ripe) >= self.settings.auto_ratio * len(seen)

    def _update_rest(self):
        self._put_in_force()
        for p in self.params:
            if p.count:
                p.update(~p.important, p.gathered, float32(1.0 / p.count))
                p.hidden = True
            p.count = 0
            p.rest_norm = p.important_norm = 0.0
        self.interval = 0
        if not self.settings.overlaps:
            self._put_in_force()

    def finish(self):
        """As `synchronize()` does: what was decided comes into force."""
        self._put_in_force()

    def _put_in_force(self):
        for p in self.params:
            if p.hidden:
                p.show(~p.important)
                p.hidden = False


def oracle(recipe: Recipe, settings, build=small_model) -> Trained:
    """The recipe of `numerics.training.train`, by the oracle."""
    model = build(recipe.dtype).to(recipe.device)
    source = optimizer_for(model)
    trained = Oracle(settings, clip=recipe.clip, source=source, rule=AdamRule.of(source))
    by_param = {id(p.param): p for p in trained.params}
    trained.params_in_order = [by_param[id(p)] for p in model.parameters()]
    scaler = None
    if recipe.dtype is torch.float16:
        scaler = DynamicLossScale(LossScaleConfig(initial_scale_power=20))
    losses, norms = [], []
    for batch in inputs(recipe):
        heard = [[] for _ in trained.params_in_order]
        for x in batch:
            loss = loss_of(model, x) / recipe.micro
            (loss * (1.0 if scaler is None else scaler.value)).backward()
            losses.append(loss.item())
            for param, grads in zip(model.parameters(), heard, strict=True):
                if param.grad is not None:
                    grads.append(param.grad)
                param.grad = None
        flat = [
            p.addends(g) if g else None for p, g in zip(trained.params_in_order, heard, strict=True)
        ]
        norm, applied = trained.step(flat, loss_scale=1.0 if scaler is None else scaler.value)
        if scaler is not None:
            scaler.update(overflowed=not applied)
        norms.append(norm)
        recipe.schedule(source.param_groups)
    trained.finish()
    ordered = trained.params_in_order
    return Trained(
        losses=losses,
        norms=norms,
        weights={name: value.detach().clone().cpu() for name, value in model.state_dict().items()},
        masters=[p.master.view(p.param.shape).cpu() for p in ordered],
        moments=[value.view(p.param.shape).cpu() for p in ordered for value in (p.m, p.v)],
        steps=[p.steps for p in ordered],
    )


def with_settings(recipe: Recipe, settings, **options) -> Recipe:
    """The recipe with the engine in this mode."""
    return replace(recipe, options=replace(recipe.options, policy=settings, **options))
