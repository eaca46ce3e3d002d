"""One part's optimizer state as flat tensors with segments: what an update works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.optim.rule import Hyper

__all__ = ["FlatState", "dtype_name", "native_hypers", "native_part"]

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def dtype_name(dtype: torch.dtype) -> str:
    """The native core's name of a dtype."""
    return _NAMES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatState:
    """Flat roles of one part; an element has the same offset in each.

    Attributes:
        high: fp32 master, or the bf16 high half when `low` is given.
        low: int16 low half, or None.
        exp_avg: fp32 first moment.
        exp_avg_sq: fp32 second moment.
        out: Where rounded weights go; None when `high` is the weight.
        segments: (offset, elements) of each parameter.
    """

    high: torch.Tensor
    low: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    out: torch.Tensor | None
    segments: tuple[tuple[int, int], ...]


def native_part(
    core: Any,
    state: FlatState,
    *,
    grad: int,
    grad_dtype: str,
    out: int = 0,
    out_dtype: str = "float32",
) -> Any:
    """The native core's description of a part in host memory.

    Args:
        core: The native core.
        state: The part; its tensors must outlive the result.
        grad: Address of the flat gradient, or 0 when each segment brings its own.
        grad_dtype: The gradient's dtype.
        out: Address for rounded weights when `state.out` is None; 0 for none.
        out_dtype: Their dtype.
    """
    if state.out is not None:
        out, out_dtype = state.out.data_ptr(), dtype_name(state.out.dtype)
    return core.PartState(
        grad,
        grad_dtype,
        "whole" if state.low is None else "split",
        state.high.data_ptr(),
        0 if state.low is None else state.low.data_ptr(),
        state.exp_avg.data_ptr(),
        state.exp_avg_sq.data_ptr(),
        out,
        out_dtype,
        list(state.segments),
        state.exp_avg.numel(),
    )


def native_hypers(core: Any, hypers: Sequence[Hyper]) -> list[Any]:
    """The native core's form of captured hyperparameters."""
    return [core.Hyper(*hyper.native()) for hyper in hypers]
