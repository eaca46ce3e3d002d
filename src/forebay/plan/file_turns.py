"""What a read of state from files waits for beside its trigger: the buffers that it comes through.

They are few: what the update begins with is read during backward, as far as they go; each other
piece when one that came before it has been updated and written. The engine's rule
(`engine.spool`), by units instead of pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.plan.file_pieces import held_pieces, piece_count
from forebay.plan.ops import OpKind

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
        self._by_unit = {op.unit: op for op in self._reads}
        self._stores = {op.unit: op.index for op in program.ops if op.kind is OpKind.STORE}
        held = held_pieces(placement)
        coming = {
            unit.layout.index: piece_count(unit, placement) - sum(held[unit.layout.index])
            for unit in placement.units
        }
        # Those whose unit needs buffers at all.
        self._through = [op for op in self._reads if op.unit is not None and coming[op.unit]]
        self._turns = {op.index: turn for turn, op in enumerate(self._through)}
        self._depth = min(placement.buffers.count, len(self._through))
        left = placement.buffers.count if placement.buffers.reads_ahead else 0
        self._ahead: dict[int, float] = {}
        for op in self._reads:
            assert op.unit is not None
            count = coming[op.unit]
            self._ahead[op.index] = op.nbytes * min(left, count) / max(1, count)
            left -= min(left, count)

    def read_of(self, op: Op) -> Op | None:
        """The read that an update waits for; None where its unit's state is not in files."""
        return self._by_unit.get(op.unit) if op.kind is OpKind.UPDATE else None

    def ahead_bytes(self, read: Op) -> float:
        """Bytes of a read that fit into buffers before the step."""
        return self._ahead[read.index]

    def frees(self, read: Op, window: int) -> tuple[int, int] | None:
        """The store that leaves a buffer to a read: its number in the program, and its window."""
        if read.index not in self._turns:
            return None
        turn = self._turns[read.index] - self._depth
        before = self._through[turn]  # from the end of the list where that was a window ago
        window -= turn < 0
        return (self._stores[before.unit], window) if window >= 0 else None
