"""Forward error bounds for Adam's update, one number for each element.

[Note: error model] `Bounded` carries an exact value x (float64 stands for it) and a bound E on the
distance of a float32 computation from it. u = 2^-24 is half the spacing of float32 above 1, and
eta = 2^-150 half the smallest subnormal. For one float32 operation with rounding to nearest, on
operands that carry errors of their own:

    a + b   exact part Ea + Eb                             rounding u |result|
    a * b   exact part |a| Eb + |b| Ea + Ea Eb             rounding u |result| + eta
    a / b   exact part (Ea + |a/b| Eb) / (|b| - Eb)        rounding u |result| + eta
    sqrt a  exact part Ea / (sqrt(a) + sqrt(a - Ea))       rounding u |result|

where |result| is at most |exact result| + exact part (Higham, Accuracy and Stability, 2.2 and 3.1;
the quotient: x^/y^ - x/y = (Ex - (x/y) Ey) / y^). A fused multiply-add rounds less often, so the
bounds hold for it too. A hyperparameter is rounded once from double: its error is u |value| + eta.
Where an operand occurs twice this is pessimistic, and `lerp` is derived as a whole instead.
The float64 evaluation itself is off by some 2^-50, relatively; `SLACK` covers that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

U = 2.0**-24
ETA = 2.0**-150
SLACK = 1.0 + 2.0**-20


@dataclass(frozen=True)
class Bounded:
    """A float64 tensor of exact values and one of error bounds."""

    value: torch.Tensor
    error: torch.Tensor

    def __add__(self, other):
        return _rounded(self.value + other.value, self.error + other.error)

    def __sub__(self, other):
        return _rounded(self.value - other.value, self.error + other.error)

    def __mul__(self, other):
        a, b = self.value.abs(), other.value.abs()
        carried = a * other.error + b * self.error + self.error * other.error
        return _rounded(self.value * other.value, carried, underflow=ETA)

    def __truediv__(self, other):
        exact = self.value / other.value
        room = other.value.abs() - other.error
        assert bool((room > 0).all()), "the denominator may be zero: there is no bound"
        carried = (self.error + exact.abs() * other.error) / room
        return _rounded(exact, carried, underflow=ETA)

    def sqrt(self, *, ulps: float = 0.5):
        """A root that is off by `ulps` units in the last place (0.5: correctly rounded)."""
        root = self.value.sqrt()
        least = (self.value - self.error).clamp(min=0.0).sqrt()
        total = root + least
        carried = torch.where(total > 0, self.error / total, self.error.sqrt())
        return _rounded(root, carried, units=2.0 * ulps)


def lerp(start: Bounded, end: Bounded, weight: Bounded) -> Bounded:
    """`start + weight * (end - start)` in that order of operations.

    Errors of `start` partly cancel: the exact part is |1 - w| Es + |w| Ee + Ew |e - s|, where the
    primitives one by one would carry (1 + |w|) Es and grow with every step. With D the largest
    computed difference and W the largest weight, the roundings are W u D (the difference),
    u W D (1 + u) + eta (the product) and u |result|.
    """
    w, largest = weight.value, weight.value.abs() + weight.error
    difference = (end.value - start.value).abs() + end.error + start.error
    carried = (1.0 - w).abs() * start.error + w.abs() * end.error + weight.error * difference
    carried = carried + largest * U * difference + largest * U * difference * (1.0 + U) + ETA
    return _rounded(start.value + w * (end.value - start.value), carried)


def _rounded(exact, carried, *, underflow: float = 0.0, units: float = 1.0) -> Bounded:
    return Bounded(exact, (carried + units * U * (exact.abs() + carried) + underflow) * SLACK)


def number(value: float) -> Bounded:
    """A hyperparameter, computed in double and rounded once to float32."""
    exact = torch.tensor(value, dtype=torch.float64)
    return Bounded(exact, U * exact.abs() + ETA)


def given(value: torch.Tensor) -> Bounded:
    """A float32 tensor that both sides read as it is."""
    exact = value.to(torch.float64)
    return Bounded(exact, torch.zeros_like(exact))


@dataclass(frozen=True)
class Settings:
    """Hyperparameters as a user writes them."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True


@dataclass(frozen=True)
class State:
    """Weight and moments."""

    p: Bounded
    m: Bounded
    v: Bounded


def ours(state: State, g: Bounded, step: int, s: Settings) -> State:
    """Bound of forebay's formula, operation by operation as `reference.update_` has them."""
    p = state.p
    if s.weight_decay and s.decoupled:
        p = p * number(1.0 - s.lr * s.weight_decay)
    elif s.weight_decay:
        g = g + number(s.weight_decay) * p
    m = lerp(state.m, g, number(1.0 - s.beta1))
    v = number(s.beta2) * state.v + (number(1.0 - s.beta2) * g) * g
    root = v.sqrt() / number(math.sqrt(1.0 - s.beta2**step))
    size = number(s.lr / (1.0 - s.beta1**step))
    return State(p - (size * m) / (root + number(s.eps)), m, v)


def torchs(state: State, g: Bounded, step: int, s: Settings) -> State:
    """Bound of torch's single-tensor CPU path (`torch/optim/adam.py`).

    It differs in the order of factors in `addcmul_` and `addcdiv_`, which torch does not promise
    (so the larger bound of both orders counts), in `lerp_`, which for weights of 0.5 and more
    steps back from the gradient, and in a float32 square root that is only within one unit in
    the last place (a vector library computes it).
    """
    p = state.p
    if s.weight_decay and s.decoupled:
        p = p * number(1.0 - s.lr * s.weight_decay)
    elif s.weight_decay:
        g = g + number(s.weight_decay) * p
    weight = 1.0 - s.beta1
    m = lerp(state.m, g, number(weight)) if weight < 0.5 else lerp(g, state.m, number(s.beta1))
    scaled = state.v * number(s.beta2)
    share = number(1.0 - s.beta2)
    v = _worse(scaled + (share * g) * g, scaled + share * (g * g))
    root = v.sqrt(ulps=1.0) / number(math.sqrt(1.0 - s.beta2**step))
    denominator = root + number(s.eps)
    size = number(s.lr / (1.0 - s.beta1**step))
    p = _worse(p - (size * m) / denominator, p - size * (m / denominator))
    return State(p, m, v)


def _worse(first: Bounded, second: Bounded) -> Bounded:
    return Bounded(first.value, torch.maximum(first.error, second.error))
