"""Doors: where a graph is cut, so that backward runs piece by piece and not all at once.

A tensor leaves its segment through a node whose backward hands on the gradient that has come to
the door, and enters later ones through a node whose backward brings it there. Neither holds
data: an activation lives as long as somebody else keeps it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from forebay.errors import UnsupportedError

__all__ = ["Door", "door_behind"]

# torch.autograd.backward takes edges of the graph since then.
_BEGINS_AT_EDGES = torch.torch_version.TorchVersion(torch.__version__) >= "2.7"


class Door:
    """One tensor on its way from one segment into later ones.

    Calls: `enter` once, `use` for each segment that does, then in backward `take` before each of
    them, and `root` once, after all.

    Args:
        tensor: It; not a leaf, with a gradient.

    Attributes:
        gradient: What has come to the door so far.
        users: The segments that use the tensor.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.gradient: torch.Tensor | None = None
        self.users: set[int] = set()
        self._edge: GradientEdge | None = None
        self._out: torch.Tensor | None = _Leave.apply(tensor, self)  # type: ignore[no-untyped-call]

    def enter(self, tensor: torch.Tensor, *, anchor: torch.Tensor) -> torch.Tensor:
        """The same values for later segments.

        Args:
            tensor: As before.
            anchor: Any tensor with a gradient; it gets none.
        """
        entered: torch.Tensor
        entered = _Enter.apply(anchor, tensor.detach(), self)  # type: ignore[no-untyped-call]
        self._edge = get_gradient_edge(entered)
        return entered

    def use(self, segment: int) -> None:
        """A later segment uses the tensor.

        Raises:
            UnsupportedError: It is not the first, and this torch begins no backward at an edge.
        """
        self.users.add(segment)
        if len(self.users) > 1 and not _BEGINS_AT_EDGES:
            raise UnsupportedError(
                "a tensor with a gradient passes over a block, and in layer order torch "
                f"{torch.__version__} cannot add up its uses in the usual order; torch 2.7 can",
                hint='update torch, or set forebay.accumulation_order: "microbatch"',
            )

    @property
    def node(self) -> Any:
        """Where the segment that was left ends in autograd's graph."""
        assert self._out is not None
        return self._out.grad_fn

    def take(self) -> tuple[GradientEdge, torch.Tensor] | None:
        """What has come from later segments, to begin the backward of another one with.

        Then its uses are added to that one by one, as if nothing were cut; None where none came.
        """
        gradient, self.gradient = self.gradient, None
        assert self._edge is not None
        return None if gradient is None else (self._edge, gradient)

    def root(self) -> torch.Tensor | None:
        """What to call backward on for the segment that was left; None where no gradient came."""
        out, self._out, self._edge = self._out, None, None
        return out if self.gradient is not None else None


def door_behind(node: Any) -> Door | None:
    """The door that a node of autograd's graph enters through; None for other nodes."""
    door: Door | None = node.door if isinstance(node, _ENTERS) else None
    return door


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
        (gradient,) = grads
        before = ctx.door.gradient
        ctx.door.gradient = gradient if before is None else before + gradient
        return None, None, None


_ENTERS: Any = _Enter._backward_cls
