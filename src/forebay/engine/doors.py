"""Doors: where a graph is cut, so that backward runs piece by piece and not all at once.

A tensor leaves one segment through a node whose backward hands on the gradient that has come to
the door, and enters the next one through a node whose backward brings it there. Neither holds
data: an activation lives as long as somebody else keeps it.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Door"]


class Door:
    """One tensor on its way from one segment into the next.

    Calls: `enter` once, then in backward `root` once, after the next segment's backward.

    Args:
        tensor: It; not a leaf, with a gradient.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.gradient: torch.Tensor | None = None
        self._out: torch.Tensor | None = _Leave.apply(tensor, self)  # type: ignore[no-untyped-call]

    def enter(self, tensor: torch.Tensor, *, anchor: torch.Tensor) -> torch.Tensor:
        """The same values for the next segment.

        Args:
            tensor: As before.
            anchor: Any tensor with a gradient; it gets none.
        """
        entered: torch.Tensor
        entered = _Enter.apply(anchor, tensor.detach(), self)  # type: ignore[no-untyped-call]
        return entered

    @property
    def node(self) -> Any:
        """Where the segment that was left ends in autograd's graph."""
        assert self._out is not None
        return self._out.grad_fn

    def root(self) -> torch.Tensor | None:
        """What to call backward on for the segment that was left; None where no gradient came."""
        out, self._out = self._out, None
        return out if self.gradient is not None else None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, door: Door) -> torch.Tensor:
        ctx.door = door
        return tensor.new_empty(())

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        gradient, ctx.door.gradient = ctx.door.gradient, None
        return gradient, None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor, door: Door) -> torch.Tensor:
        del anchor
        ctx.door = door
        # An input that is returned becomes a view, which may not be written into.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (ctx.door.gradient,) = grads
        return None, None, None
