"""Addends of weights that several segments of a backward use: held until they are whole.

In the usual order autograd adds up what the uses of a weight in one micro-batch give, in the
weight's dtype and in the order in which backward comes by, and that is one addend. Where backward
runs segment by segment, a segment begins with what later ones have brought, as a root of its own,
so that autograd adds its uses to that one by one. What a reentrant checkpoint brings is an addend
of its own in either order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from forebay.engine.record import ParamRecord

__all__ = ["HeldAddends"]


class _Addends:
    """Of one weight in one micro-batch, in the order in which the usual backward has them."""

    def __init__(self) -> None:
        self.entries: list[torch.Tensor] = []
        self._sum: torch.Tensor | None = None

    def add(self, addend: torch.Tensor, *, alone: bool) -> None:
        if not alone:
            earlier = self.take_sum()  # unless the segment began with it
            addend = addend if earlier is None else earlier + addend
            self._sum = addend
        # the sum is complete, and comes, when its last part does
        self.entries.append(addend)

    def take_sum(self) -> torch.Tensor | None:
        """What is added up so far, which is here no more."""
        taken, self._sum = self._sum, None
        self.entries = [entry for entry in self.entries if entry is not taken]
        return taken


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

    def resume(self, indices: Iterable[int]) -> list[tuple[ParamRecord, torch.Tensor]]:
        """What the present micro-batch's later segments have brought of these parameters.

        It comes back through `take` with what this segment adds to it.
        """
        found = []
        for index in indices:
            record, members = self._held.get(index, (None, {}))
            held = members.get(self.micro_batch)
            earlier = None if held is None else held.take_sum()
            if record is not None and earlier is not None:
                found.append((record, earlier))
        return found

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
