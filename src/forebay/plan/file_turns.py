"""What a read of state from files waits for beside its trigger: the buffers that it comes through.

They are few: what the update begins with is read during backward, as far as they go; each other
piece when one that came before it has been updated and written. The engine's rule
(`engine.spool`), by units instead of pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.plan.ops import OpKind
from forebay.plan.placement import UpdatePlace
from forebay.plan.records import record_count

if TYPE_CHECKING:
    from forebay.plan.ops import Op
    from forebay.plan.placement import Placement
    from forebay.plan.program import Program

__all__ = ["FileTurns"]


class FileTurns:
    """The reads of a program's windows and what frees their buffers.

    Args:
        program: With its reads in the order of the update.
        placement: The placement that it was built from.
    """

    def __init__(self, program: Program, placement: Placement) -> None:
        self._reads = [op for op in program.ops if op.kind is OpKind.READ]
        self._stores = {op.unit: op.index for op in program.ops if op.kind is OpKind.STORE}
        self._depth = min(placement.buffers.count, len(self._reads))
        pieces = _coming(placement)
        left = placement.buffers.count if placement.buffers.reads_ahead else 0
        self._ahead: dict[int, float] = {}
        for op in self._reads:
            assert op.unit is not None
            count = pieces[op.unit]
            self._ahead[op.index] = op.nbytes * min(left, count) / max(1, count)
            left -= min(left, count)

    def read_of(self, op: Op) -> Op | None:
        """The read that an update waits for; None where its unit's state is not in files."""
        if op.kind is not OpKind.UPDATE:
            return None
        return next((read for read in self._reads if read.unit == op.unit), None)

    def ahead_bytes(self, read: Op) -> float:
        """Bytes of a read that fit into buffers before the step."""
        return self._ahead[read.index]

    def frees(self, read: Op, window: int) -> tuple[int, int] | None:
        """The store that leaves a buffer to a read: its number in the program, and its window."""
        place = self._reads.index(read) - self._depth
        before = self._reads[place]  # from the end of the list where that was a window ago
        window -= place < 0
        return (self._stores[before.unit], window) if window >= 0 else None


def _coming(placement: Placement) -> dict[int, int]:
    """Pieces of each unit in files that come and go, without those that buffers hold."""
    held, found = placement.buffers.held, {}
    for unit in placement.units:
        if unit.update is not UpdatePlace.NVME:
            continue
        count = sum(
            record_count(
                placement.sharding.state(part).elements,
                piece_elements=placement.buffers.piece_elements,
            )
            for part in unit.layout.parts
        )
        found[unit.layout.index] = count - min(held, count)
        held -= min(held, count)
    return found
