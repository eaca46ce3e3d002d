"""What an engine needs beside everything else when some units' weights live on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.engine.host_weights import HostWeights
from forebay.engine.masters import refresh_master
from forebay.engine.publisher import Publisher
from forebay.engine.residency import Residency
from forebay.engine.saved_weights import SavedWeights
from forebay.engine.streaming_hooks import StreamingHooks
from forebay.engine.unit import WeightState
from forebay.model.tree import smallest_around
from forebay.plan.memory import streamed_bytes
from forebay.plan.weight_pool import WeightPool
from forebay.tiers.ledger import Ledger, Role, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from forebay.engine.record import ParamRecord
    from forebay.engine.unit import NanSource, Unit
    from forebay.links.lanes import Lanes
    from forebay.plan.placement import Placement

__all__ = ["Streaming"]


class Streaming:
    """Residency, its source and its hooks.

    Args:
        units: Every unit by index.
        placement: Which of them stream, and the pool's bytes.
        lanes: The link.
        ledger: Where the pool is reserved.
        nans: What weights that are away are viewed as.
        fail: Closes the engine when a transfer failed.

    Attributes:
        residency: Brings weights and lets go of them.
        source: Where they come from.
        publisher: Takes new weights after an update.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        placement: Placement,
        lanes: Lanes,
        ledger: Ledger,
        nans: NanSource,
        fail: Callable[[str], None],
    ) -> None:
        self._units = [unit for unit in units if unit.streams_weights]
        self.source = HostWeights(lanes, piece_elements=placement.piece_elements)
        pool = WeightPool(
            {unit.index: streamed_bytes(unit.placement.layout) for unit in self._units},
            capacity_bytes=placement.pool_bytes,
            names={unit.index: unit.name for unit in self._units},
        )
        self.residency = Residency(
            units, pool=pool, source=self.source, lanes=lanes, nans=nans, fail=fail
        )
        self.publisher = Publisher(
            lanes,
            nans=nans,
            piece_elements=placement.piece_elements,
            residency=self.residency,
            source=self.source,
            is_gathered=placement.gathers_weights,
        )
        self._reservation = ledger.reserve(
            Tier.DEVICE, Role.LP_PARAMS, placement.pool_bytes, what="weights that come and go"
        )
        self._hooks: StreamingHooks | None = None

    def attach(
        self,
        root: nn.Module,
        *,
        owners: Sequence[Sequence[nn.Module]],
        before_copy: Callable[[dict[int, Any] | None], None],
    ) -> None:
        """Hook the modules; a no-op where no unit streams."""
        if not self._units:
            return
        units_of: dict[int, tuple[Unit, ...]] = {}
        members: dict[int, tuple[ParamRecord, Unit]] = {}
        for unit in self._units:
            around = [owner for r in unit.records for owner in owners[r.index]]
            anchor = smallest_around(root, [owners[r.index][0] for r in unit.records])
            if anchor is not None and anchor is not root:
                around.append(anchor)
            for module in around:
                known = units_of.get(id(module), ())
                if unit not in known:
                    units_of[id(module)] = (*known, unit)
            members.update({id(record.param): (record, unit) for record in unit.records})
        self._hooks = StreamingHooks(
            root,
            residency=self.residency,
            saved=SavedWeights(self._units, use=self.residency.use_in_node),
            units_of=units_of,
            members=members,
            before_copy=before_copy,
        )

    def declare(self, module: nn.Module, unit: Unit) -> None:
        """A module reads weights of a unit that it does not own."""
        if self._hooks is not None and unit.streams_weights:
            self._hooks.declare(module, unit)

    def take_over(self, units: Iterable[Unit] | None = None) -> None:
        """Let stored weights follow what the user wrote or assigned."""
        for unit in self._units if units is None else units:
            if not unit.streams_weights:
                continue
            was_away = unit.state is not WeightState.READY
            changed = [record for record in unit.records if refresh_master(record)]
            if changed and was_away:
                self.residency.drop_all([unit])

    def detach(self) -> None:
        """Remove the hooks and give the pool back."""
        if self._hooks is not None:
            self._hooks.detach()
        self._reservation.release()
