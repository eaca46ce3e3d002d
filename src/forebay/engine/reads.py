"""Where a forward pass first reads each weight, seen in the graph that it leaves behind.

A module that uses another one's weight calls no hook of its owner. But autograd numbers its nodes
in the order of the computation, so the graph tells whether a weight was read before somebody
waited for it. Looked at once, after the first pass; a checkpointed region hides its reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from forebay.errors import PendingWeightError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["EarlyReads", "first_reads", "next_number", "reads_since", "tensors_in"]

# Chance does it too, but hardly so often in a row.
_SUSPICIOUS = 3


def next_number() -> int:
    """The number of the node that autograd makes next in this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def first_reads(outputs: Iterable[torch.Tensor]) -> dict[int, int]:
    """For the `id` of each leaf behind `outputs`, the lowest number of a node that reads it."""
    first: dict[int, int] = {}
    for leaf, number in reads_since(outputs):
        first[leaf] = min(number, first.get(leaf, number))
    return first


def reads_since(outputs: Iterable[torch.Tensor], *, begin: int = 0) -> Iterator[tuple[int, int]]:
    """The `id` of each leaf behind `outputs`, with the number of each node that reads it.

    Args:
        outputs: What a forward returned.
        begin: Nodes with lower numbers, and what is behind them, are passed over.
    """
    pending: list[Any] = [out.grad_fn for out in outputs if out.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        number = node._sequence_nr()
        if number < begin:
            continue
        for source, _ in node.next_functions:
            if source is None:
                continue
            leaf = getattr(source, "variable", None)
            if leaf is not None:
                yield id(leaf), number
            elif source not in seen:
                seen.add(source)
                pending.append(source)


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested containers and dataclass-like outputs."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from (v for v in vars(leaf).values() if isinstance(v, torch.Tensor))


class EarlyReads:
    """Notices from the outcomes of steps that some weight is read before anybody waits for it.

    Such a read gives NaN in windows that begin with weights on their way, and skips them. After a
    skip nothing is on its way, so the next window is fine: the two take turns.

    Args:
        deferred: Whether windows may begin with weights on their way.
    """

    def __init__(self, *, deferred: bool) -> None:
        self._deferred = deferred
        self._began_pending = False
        self._fine_between = False
        self._suspicious = 0

    def note(self, *, finite: bool, applied: bool, bad: str = "") -> None:
        """Take note of a window's gradients.

        Args:
            finite: Whether all were.
            applied: Whether the step changes weights.
            bad: The first parameter whose gradient was not finite.

        Raises:
            PendingWeightError: It happened too often for chance.
        """
        began_pending = self._began_pending
        self._began_pending = applied and self._deferred
        if began_pending and not finite:
            goes_on = self._fine_between or not self._suspicious
            self._suspicious = self._suspicious + 1 if goes_on else 0
            self._fine_between = False
        elif began_pending or not finite:
            self._suspicious = 0
        else:
            self._fine_between = True
        if self._suspicious >= _SUSPICIOUS:
            raise PendingWeightError(
                f"gradients ({bad}) were not finite in {_SUSPICIOUS} windows that began while "
                "weights were on their way, and finite in those between: a weight is read "
                "before its module is called",
                hint="call optimizer.synchronize() before using weights outside their module's "
                "forward, or set forebay.synchronous: true",
            )
