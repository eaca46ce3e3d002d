"""Accumulation weighted by tokens trains as one large batch, within a bound that is derived.

[Note: the bound] One linear layer W (V x D) and cross entropy, summed over T label tokens and
divided by T. Element (v, d) of the gradient is sum_t (p_tv - y_tv) x_td / T. With unit roundoff
u = 2^-24 and gamma_n = n u / (1 - n u), whatever the order of additions:

* a logit is off by at most gamma_D sum_d |W_vd| |x_td|, eps_t at most over v;
* so log p is off by at most 2 eps_t + gamma_{V+8} + 6 u L, with L the largest of |z - max z| and
  |log p| (exp and log are good to 4 ulp, the sum over V to gamma_V), and p by a factor of 1 plus
  that, r_t;
* subtracting y, scaling by the window's 1/T and rounding that scale cost 3 u each of p + y;
* T products are added, then k micro-batches in fp32: gamma_{T+k}.

So each way to compute it is within sum_t |x_td| (p_tv r_t + (p_tv + y_tv) (3 u + gamma_{T+k})) / T
of the exact gradient, and two ways are within twice that of each other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.train.forward import sum_of_token_losses
from forebay.utils import safe_get_full_grad

VOCABULARY, WIDTH, LENGTH = 11, 16, 12
# Label tokens of each row: most micro-batches have far fewer than the largest.
TOKENS = [11, 1, 2, 9, 3, 1]
U = 2.0**-24


def _gamma(n: int) -> float:
    return n * U / (1 - n * U)


class Head(nn.Module):
    """Inputs are the hidden states themselves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(len(TOKENS), LENGTH, WIDTH, generator=generator)
    labels = torch.randint(VOCABULARY, (len(TOKENS), LENGTH), generator=generator)
    for row, count in enumerate(TOKENS):
        labels[row, count + 1 :] = -100
        labels[row, 0] = -100  # position 0 has no prediction before it
    return x, labels


def _gradient(rows_per_batch: int, *, weigh_tokens: bool = True) -> tuple[torch.Tensor, float]:
    """The window's gradient through the engine, and the norm that its update saw."""
    x, labels = _data()
    steps = len(TOKENS) // rows_per_batch
    model = Head()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows_per_batch,
        "gradient_accumulation_steps": steps,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = forebay.initialize(model=model, optimizer=optimizer, config=config)
    with engine:
        for start in range(0, len(TOKENS), rows_per_batch):
            part = slice(start, start + rows_per_batch)
            logits = engine(x[part].to(engine.device))
            loss = sum_of_token_losses(logits, labels[part].to(engine.device))
            if weigh_tokens:
                engine.backward(loss / sum(TOKENS), scale_wrt_gas=False)
            else:
                engine.backward(loss / sum(TOKENS[part]))
            if start + rows_per_batch < len(TOKENS):
                engine.step()
        gradient = safe_get_full_grad(model.linear.weight)
        assert gradient is not None
        engine.step()
        norm = engine.get_global_grad_norm()
        assert norm is not None
        return gradient.cpu(), norm


def _exact_and_bound(num_micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient in float64, and how far an fp32 computation may be from it."""
    x, labels = _data()
    learned = labels[:, 1:] != -100
    hidden = x[:, :-1][learned].double()
    target = nn.functional.one_hot(labels[:, 1:][learned], VOCABULARY).double()
    weight = Head().linear.weight.detach().double()
    logits = hidden @ weight.T
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    total = len(hidden)
    assert total == sum(TOKENS)
    exact = (p - target).T @ hidden / total
    eps = _gamma(WIDTH) * (hidden.abs() @ weight.abs().T).amax(-1, keepdim=True)
    largest = torch.maximum(
        (logits.amax(-1, keepdim=True) - logits).amax(-1, keepdim=True),
        log_p.abs().amax(-1, keepdim=True),
    )
    relative = 2 * eps + _gamma(VOCABULARY + 8) + 6 * U * largest
    per_token = p * relative + (p + target) * (3 * U + _gamma(total + num_micro))
    return exact, per_token.T @ hidden.abs() / total


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_accumulation_is_one_large_batch(rows):
    parts, norm = _gradient(rows)
    whole, whole_norm = _gradient(len(TOKENS))
    exact, bound = _exact_and_bound(len(TOKENS) // rows)
    for gradient in (parts, whole):
        assert bool(((gradient.double() - exact).abs() <= bound).all())
    assert bool(((parts - whole).double().abs() <= 2 * bound).all())
    # norms differ by at most the norm of the difference, and their own rounding in float64
    assert abs(norm - whole_norm) <= 2 * float(bound.norm()) + 1e-12


def test_a_mean_of_means_is_far_outside_the_bound():
    """What goes wrong without the weights, so that the bound says something."""
    wrong, _ = _gradient(1, weigh_tokens=False)
    exact, bound = _exact_and_bound(len(TOKENS))
    assert float(((wrong.double() - exact).abs() / bound).median()) > 1000
