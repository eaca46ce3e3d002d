"""The Adam update in torch operations: the definition of the bits.

Slow and exact, on CPU and CUDA; the native core and the Triton kernels are compared with it. See
[Note: one arithmetic] in `forebay.optim`.

[Note: no torch shortcuts] Scalars become 0-dim tensors on the device of the state, because torch
on CUDA turns a division by a Python number into a multiplication by its reciprocal. `alpha=`,
`lerp_` and `addcdiv_` are avoided, because they may fuse a multiplication and an addition into
one rounding. `torch.sqrt` of float32 on CPU is not correctly rounded (a vector library computes it;
one value in six is off by a bit), so the root is taken in float64 and rounded: with 24 bits the
exact root stays at least 2^-51 away, relatively, from the middle of two float32, and a float64 root
errs by less than that. `torch.set_flush_denormal(True)` breaks the definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from forebay.optim.master import join, round_bf16, split
from forebay.optim.rule import DecayMode

if TYPE_CHECKING:
    from forebay.optim.rule import Hyper

__all__ = ["AdamState", "round_to", "update_"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdamState:
    """The tensors of one range of parameters; all of one shape, on one device.

    Attributes:
        master: fp32 (whole layout), or the bf16 working weight that is the high half (split).
        low: int16 low half in the split layout; None makes the layout whole.
        exp_avg: fp32 first moment.
        exp_avg_sq: fp32 second moment.
    """

    master: torch.Tensor
    low: torch.Tensor | None = None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    def __post_init__(self) -> None:
        expected = torch.float32 if self.low is None else torch.bfloat16
        if self.master.dtype is not expected:
            raise TypeError(f"the master is {self.master.dtype}; this layout has {expected}")


def update_(
    state: AdamState,
    *,
    grad: torch.Tensor,
    scale: float | torch.Tensor,
    hyper: Hyper,
    out: torch.Tensor | None = None,
) -> None:
    """Update a range in place and write out its new working weight.

    Args:
        state: Changed in place; in the split layout the new weight is its high half.
        grad: float32, bfloat16 or float16; not changed (it may share memory with `out`).
        scale: What gradients are multiplied by, an exact float32 value (number or 0-dim fp32
            tensor), with `hyper.sign` already in it.
        hyper: The captured numbers.
        out: Where the rounded weight goes (float32, bfloat16 or float16), or None.
    """
    device = state.exp_avg.device

    def scalar(value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float32, device=device)

    factor = scale if isinstance(scale, torch.Tensor) else scalar(scale)
    p = state.master if state.low is None else join(state.master, state.low)
    m, v = state.exp_avg, state.exp_avg_sq
    g = grad.to(torch.float32) * factor
    if hyper.decay_mode is DecayMode.L2:
        g = g + scalar(hyper.decay) * p
    elif hyper.decay_mode is DecayMode.DECOUPLED:
        p = p * scalar(hyper.decay)
    m = m + scalar(hyper.one_minus_beta1) * (g - m)
    v = scalar(hyper.beta2) * v + (scalar(hyper.one_minus_beta2) * g) * g
    root = v.to(torch.float64).sqrt().to(torch.float32)
    denominator = root / scalar(hyper.bias_correction2_sqrt) + scalar(hyper.eps)
    p = p - (scalar(hyper.step_size) * m) / denominator

    state.exp_avg.copy_(m)
    state.exp_avg_sq.copy_(v)
    if state.low is None:
        state.master.copy_(p)
    else:
        high, low = split(p)
        state.master.copy_(high)
        state.low.copy_(low)
    if out is not None:
        out.copy_(round_to(p, out.dtype))


def round_to(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round fp32 to a working dtype.

    bf16 rounds half away from zero ([Note: half away] in `forebay.optim.master`); fp16 rounds half
    to even, overflows to infinity and keeps subnormals; fp32 is returned as it is.

    Raises:
        TypeError: Any other dtype.
    """
    if dtype is torch.bfloat16:
        return round_bf16(value)
    if dtype is torch.float16:
        return value.to(torch.float16)
    if dtype is torch.float32:
        return value
    raise TypeError(f"a working weight is float32, bfloat16 or float16, not {dtype}")
