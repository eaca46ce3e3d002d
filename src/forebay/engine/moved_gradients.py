"""An open window's gradients on the device, as state that may be moved away and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.tiers.ledger import Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from forebay.engine.part import PartStorage
    from forebay.engine.record import ParamRecord
    from forebay.engine.unit import Unit

__all__ = ["GradientPlace", "gradient_places"]


@dataclass(frozen=True, slots=True)
class GradientPlace:
    """Where one gradient tensor is kept: an addend or a sum of a record, or a sum over ranks."""

    record: ParamRecord | None
    part: PartStorage
    addend: int | None = None

    @property
    def role(self) -> Role:
        """One backward's gradient, or sums in fp32."""
        return Role.CONTIGUOUS_GRAD_BUFFER if self.addend is None else Role.LP_GRADS

    def get(self) -> torch.Tensor | None:
        """The tensor; None when the gradient is gone."""
        if self.record is None:
            return self.part.sums.here
        if self.addend is None:
            return self.record.total
        return self.record.addends[self.addend] if self.addend < len(self.record.addends) else None

    def put(self, value: torch.Tensor) -> None:
        """Put the same gradient there from elsewhere."""
        if self.record is None:
            self.part.sums.here = value
        elif self.addend is None:
            self.record.total = value
        else:
            self.record.addends[self.addend] = value


def gradient_places(units: Sequence[Unit]) -> Iterator[GradientPlace]:
    """Every gradient that is on the device now."""
    for unit in units:
        for part in unit.parts:
            if part.sums.here is not None:
                yield GradientPlace(None, part)
        for record in unit.records:
            if record.total is not None:
                record.await_sum()
                yield GradientPlace(record, record.part)
            for place in range(len(record.addends)):
                yield GradientPlace(record, record.part, place)
