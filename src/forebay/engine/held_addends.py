"""Addends of weights that several segments of a backward use: held until they are whole.

In the usual order autograd adds up what the uses of a weight in one micro-batch give, in the
weight's dtype and in the order in which backward comes by, and that is one addend. Where backward
runs segment by segment, each segment brings its own part; here they become the same addend. What a
reentrant checkpoint brings is an addend of its own in either order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from forebay.engine.record import ParamRecord

__all__ = ["HeldAddends"]


class _Addends:
    """Of one weight in one micro-batch, in the order in which the usual backward has them."""

    def __init__(self) -> None:
        self.entries: list[torch.Tensor] = []
        self._sum: torch.Tensor | None = None

    def add(self, addend: torch.Tensor, *, alone: bool) -> None:
        if alone:
            self.entries.append(addend)
            return
        # the sum is complete, and comes, when its last part does
        if self._sum is not None:
            self.entries = [entry for entry in self.entries if entry is not self._sum]
            addend = self._sum + addend
        self._sum = addend
        self.entries.append(addend)


class HeldAddends:
    """Takes addends while a window's backward runs by segments.

    Args:
        lowest: For the index of each shared parameter, the last segment (counted from the model's
            begin) that brings a part.
        deliver: Takes each whole addend.

    Attributes:
        segment: The segment whose backward runs.
        micro_batch: Whose.
        task: Autograd's graph task of it; inner ones belong to reentrant checkpoints.
    """

    def __init__(
        self,
        lowest: Mapping[int, int],
        *,
        deliver: Callable[[ParamRecord, torch.Tensor], None],
    ) -> None:
        self.lowest = dict(lowest)
        self._deliver = deliver
        self._held: dict[int, tuple[ParamRecord, dict[int, _Addends]]] = {}
        self._seen: dict[int, int] = {}
        self.segment = 0
        self.micro_batch = 0
        self.task = -1

    def take(self, record: ParamRecord, addend: torch.Tensor) -> bool:
        """Hold an addend; False where it is whole already.

        Raises:
            GradientError: A parameter has gradients of several segments, and nobody knew.
        """
        if record.index not in self.lowest:
            if self._seen.setdefault(record.index, self.segment) != self.segment:
                raise GradientError(
                    f"{record.label} is used in several blocks, which their modules do not show",
                    hint="declare it with forebay.zero.register_external_parameter(module, weight) "
                    'or set forebay.accumulation_order: "microbatch"',
                )
            return False
        _, members = self._held.setdefault(record.index, (record, {}))
        inner = torch._C._current_graph_task_id() != self.task
        members.setdefault(self.micro_batch, _Addends()).add(addend, alone=inner)
        return True

    def release(self, segment: int) -> None:
        """All micro-batches have passed a segment: hand on what has no more parts to come."""
        whole = [index for index in self._held if self.lowest[index] >= segment]
        for index in whole:
            record, members = self._held.pop(index)
            for number in sorted(members):
                for addend in members[number].entries:
                    self._deliver(record, addend)
