"""Where a forward pass first reads each weight, seen in the graph that it leaves behind.

A module that uses another one's weight calls no hook of its owner. But autograd numbers its nodes
in the order of the computation, so the graph tells whether a weight was read before somebody
waited for it. Looked at once, after the first pass; a checkpointed region hides its reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["first_reads", "next_number"]


def next_number() -> int:
    """The number of the node that autograd makes next in this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def first_reads(outputs: Iterable[torch.Tensor]) -> dict[int, int]:
    """For the `id` of each leaf behind `outputs`, the lowest number of a node that reads it."""
    first: dict[int, int] = {}
    pending: list[Any] = [out.grad_fn for out in outputs if out.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        number = node._sequence_nr()
        for source, _ in node.next_functions:
            if source is None:
                continue
            leaf = getattr(source, "variable", None)
            if leaf is not None:
                first[id(leaf)] = min(number, first.get(id(leaf), number))
            elif source not in seen:
                seen.add(source)
                pending.append(source)
    return first
