"""A gradient path with somebody who looks at gradients before they leave the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from forebay.engine.gradients import GradientPath
    from forebay.engine.part import PartStorage
    from forebay.engine.record import ParamRecord
    from forebay.engine.shared_gradients import SharedGradients
    from forebay.engine.unit import Unit

__all__ = ["WatchedGradients"]


class WatchedGradients:
    """Passes everything on; see `GradientPath` and `SharedGradients`.

    Args:
        path: What is watched.
        look: Told of each final gradient that is about to leave: the parameter and what this rank
            has of it.
    """

    def __init__(
        self,
        path: GradientPath | SharedGradients | WatchedGradients,
        *,
        look: Callable[[ParamRecord, torch.Tensor], None],
    ) -> None:
        self._path = path
        self._look = look

    def land(self, unit: Unit) -> None:
        """Show what leaves, and let it."""
        for record, value in self._path.leaving(unit):
            self._look(record, value)
        self._path.land(unit)

    def norm(self, unit: Unit) -> None:
        """As the path."""
        self._path.norm(unit)

    def keep(self, unit: Unit) -> None:
        """As the path."""
        self._path.keep(unit)

    def land_fold(self, unit: Unit) -> None:
        """As the path: addends are not final, and nobody is shown them."""
        self._path.land_fold(unit)

    def leaving(self, unit: Unit) -> list[tuple[ParamRecord, torch.Tensor]]:
        """As the path."""
        return self._path.leaving(unit)

    def final(self, record: ParamRecord) -> torch.Tensor:
        """As the path."""
        return self._path.final(record)

    def has_grown(self, record: ParamRecord) -> bool:
        """Whether more than what was shown is on the host."""
        return self._path.has_grown(record)

    def refresh_high(self, part: PartStorage) -> None:
        """As the path."""
        self._path.refresh_high(part)

    def catch_up(self) -> None:
        """As the path."""
        self._path.catch_up()

    def forget(self) -> None:
        """As the path."""
        self._path.forget()

    def discard(self) -> None:
        """As the path."""
        self._path.discard()
