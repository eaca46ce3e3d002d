"""One piece of one part in one step, where state comes from files: what is updated, and where.

It moves nothing; `engine.spool` does.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from forebay.model.layout import ITEM_BYTES
from forebay.plan.records import ROLES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from forebay.engine.part import PartStorage
    from forebay.engine.record import ParamRecord
    from forebay.engine.terms import UpdateOrder
    from forebay.plan.records import Record

__all__ = ["NewWeights", "PieceJob", "jobs_of"]


class NewWeights(Enum):
    """Where an update leaves new weights."""

    APART = "apart"
    """Where they are sent from at once, or where they live on the host."""
    OVER_GRADIENT = "over the gradient"
    """In the place of the gradient that they came from, from its start."""


class PieceJob:
    """One piece of one part in one step.

    Attributes:
        part: The part.
        state: Its state.
        index: The record's index.
        record: The record.
        segments: (offset, elements) in the piece of each parameter that has elements there.
        names: Their names.
        chosen: Their places in the hyperparameters, -1 where absent.
        where: Where new weights go.
        buffer: Address of the buffer, once there is one.
    """

    def __init__(
        self,
        part: PartStorage,
        records: Sequence[ParamRecord],
        index: int,
        order: UpdateOrder,
        *,
        where: NewWeights,
    ) -> None:
        assert part.files is not None
        self.part, self.state, self.index, self.where = part, part.files, index, where
        self.record: Record = part.files.records[index]
        self.segments: list[tuple[int, int]] = []
        self.names: list[str] = []
        self.chosen: list[int] = []
        self.buffer = 0
        for member in records:
            begin = max(member.segment.offset, self.record.begin)
            end = min(member.segment.end, self.record.end)
            if begin < end:
                self.segments.append((begin - self.record.begin, end - begin))
                self.names.append(member.label)
                self.chosen.append(order.hyper_of.get(member.index, -1))

    @property
    def is_whole(self) -> bool:
        """Whether every parameter of the piece is updated."""
        return all(hyper >= 0 for hyper in self.chosen)

    @property
    def is_present(self) -> bool:
        """Whether any parameter of the piece is updated."""
        return any(hyper >= 0 for hyper in self.chosen)

    @property
    def new_weights(self) -> int:
        """Address of the new weights: in their place on the host, behind the record, or in it.

        Or over the gradient.
        """
        if self.where is NewWeights.OVER_GRADIENT:
            return self.gradient
        if self.part.stores_on_host:
            return self.part.weights.data_ptr() + self.part.dtype.itemsize * self.record.begin
        return self.buffer + (0 if self.part.layout.dtype == "float32" else self.record.nbytes)

    @property
    def gradient(self) -> int:
        """Address of its gradient."""
        part = self.part
        return part.gradient_address + ITEM_BYTES[part.gradient_dtype] * self.record.begin

    def native(self, core: Any) -> Any:
        """The native core's description of it."""
        part, record = self.part, self.record
        dtype = part.layout.dtype
        master, exp_avg, exp_avg_sq = (
            self.buffer + role * record.role_bytes for role in range(len(ROLES))
        )
        return core.PartState(
            self.gradient,
            part.gradient_dtype,
            "whole",
            master,
            0,
            exp_avg,
            exp_avg_sq,
            0 if self.new_weights == self.buffer else self.new_weights,
            dtype,
            self.segments,
            record.elements,
        )


def jobs_of(
    part: PartStorage, records: Sequence[ParamRecord], order: UpdateOrder, *, where: NewWeights
) -> Iterator[PieceJob]:
    """A part's pieces that are updated."""
    for index in range(len(part.files.records) if part.files is not None else 0):
        job = PieceJob(part, records, index, order, where=where)
        if job.is_present:
            yield job
