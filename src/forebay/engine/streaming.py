"""What an engine needs beside everything else when some units' weights live on the host."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from forebay.engine.activations import ActivationStore
from forebay.engine.host_weights import HostWeights
from forebay.engine.masters import refresh_master
from forebay.engine.options import ActivationPlace
from forebay.engine.publisher import Publisher
from forebay.engine.rank_weights import RankWeights
from forebay.engine.residency import Residency
from forebay.engine.saved_weights import SavedWeights
from forebay.engine.streaming_hooks import StreamingHooks
from forebay.engine.unit import WeightState
from forebay.engine.weight_spool import WeightSpool, weight_spool
from forebay.model.external import external_parameters
from forebay.model.holding import held_by_modules
from forebay.plan.exchange_memory import exchange_bytes
from forebay.plan.home_bytes import streamed_bytes
from forebay.plan.placement import WeightPlace
from forebay.plan.weight_pool import WeightPool
from forebay.tiers.ledger import Role, Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn

    from forebay.engine.barrier import Barrier
    from forebay.engine.direct_weights import DirectWeights
    from forebay.engine.hooks import ModuleHooks
    from forebay.engine.options import EngineOptions
    from forebay.engine.record import ParamRecord
    from forebay.engine.state_memory import PartMemory
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
        memory: Where memory comes from; the pool is reserved in its ledger.
        nans: What weights that are away are viewed as.
        barrier: Closes the engine when a transfer failed, and refuses once it is closed.

    Attributes:
        residency: Brings weights and lets go of them.
        source: Where they come from.
        activations: Keeps boundary activations on the host; None where they stay.
        publisher: Takes new weights after an update.
        nans: As above.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        placement: Placement,
        lanes: Lanes,
        memory: PartMemory,
        nans: NanSource,
        barrier: Barrier,
    ) -> None:
        self.nans = nans
        self._units = [unit for unit in units if unit.streams_weights]
        self.source: HostWeights | RankWeights
        self._spool: WeightSpool | DirectWeights | None = None
        in_files = any(unit.weights is WeightPlace.NVME for unit in placement.units)
        if lanes.ranks is None or placement.sharding.stage == 0:
            if in_files:
                self._spool = weight_spool(lanes, placement=placement, memory=memory)
            self.source = HostWeights(
                lanes, piece_elements=placement.piece_elements, spool=self._spool
            )
        else:
            slices = None
            if in_files:
                slices = self._spool = WeightSpool(lanes, placement=placement, memory=memory)
            self.source = RankWeights(lanes.ranks, units=units, lanes=lanes, spool=slices)
        pool = WeightPool(
            {unit.index: streamed_bytes(unit.placement.layout) for unit in self._units},
            capacity_bytes=placement.pool_bytes,
            names={unit.index: unit.name for unit in self._units},
            rules=placement.loads,
        )
        self.residency = Residency(
            units, pool=pool, source=self.source, lanes=lanes, nans=nans, barrier=barrier
        )
        self.residency.reserve = partial(
            memory.ledger.reserve,
            Tier.DEVICE,
            Role.LP_PARAMS,
            what="weights that are shown together",
        )
        self.publisher = Publisher(
            lanes,
            nans=nans,
            piece_elements=placement.piece_elements,
            residency=self.residency,
            source=self.source,
            is_gathered=placement.gathers_weights,
        )
        self._reservation = memory.ledger.reserve(
            Tier.DEVICE, Role.LP_PARAMS, placement.pool_bytes, what="weights that come and go"
        )
        self._between = memory.ledger.reserve(
            Tier.DEVICE, Role.STAGING, exchange_bytes(placement), what="exchanges between ranks"
        )
        self._memory, self._lanes = memory, lanes
        self.activations: ActivationStore | None = None
        self._hooks: StreamingHooks | None = None

    def attach(
        self,
        root: nn.Module,
        *,
        owners: Sequence[Sequence[nn.Module]],
        options: EngineOptions,
        hooks: ModuleHooks,
    ) -> None:
        """Hook the modules; a no-op where no unit streams and activations stay.

        Args:
            root: The model.
            owners: For each parameter index, the modules that hold it.
            options: Where what checkpointing keeps waits.
            hooks: The hooks that every engine has; they know what to do when a model is copied.
        """
        if options.activations is ActivationPlace.HOST:
            self.activations = ActivationStore(self._lanes, memory=self._memory)
        elif not self._units:
            return
        held = held_by_modules(
            root,
            owners={
                unit.index: [owners[record.index] for record in unit.records]
                for unit in self._units
            },
        )
        by_index = {unit.index: unit for unit in self._units}
        members: dict[int, tuple[ParamRecord, Unit]] = {}
        for unit in self._units:
            members.update({id(record.param): (record, unit) for record in unit.records})
        for module in root.modules():
            for param in external_parameters(module):
                known = held.get(id(module), ())
                if id(param) in members and members[id(param)][0].unit not in known:
                    held[id(module)] = (*known, members[id(param)][0].unit)
        self._hooks = StreamingHooks(
            root,
            residency=self.residency,
            saved=SavedWeights(
                self._units,
                activations=self.activations,
                use=self.residency.use_in_node,
                away_reads=self.residency.away_reads,
            ),
            units_of={key: tuple(by_index[i] for i in found) for key, found in held.items()},
            members=members,
            hooks=hooks,
        )

    def declare(self, module: nn.Module, param: nn.Parameter) -> None:
        """A module reads a weight that it does not own."""
        if self._hooks is not None:
            self._hooks.declare(module, param)

    @contextlib.contextmanager
    def window(self, records: Iterable[ParamRecord]) -> Iterator[None]:
        """Inside it, weights are on the device; what is written into them is kept.

        Raises:
            BudgetError: The device budget does not hold all of them at once; nothing has moved.
        """
        streamed = {unit.index: unit for unit in self._units}
        chosen = [record for record in records if record.unit in streamed]
        indices = list(dict.fromkeys(record.unit for record in chosen))
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.residency.room_for(indices))
            for index in indices:
                stack.enter_context(self.residency.showing(streamed[index]))
            yield
            for record in chosen:
                refresh_master(record)

    def gradient_arrived(self, param: nn.Parameter) -> None:
        """Backward has done with a parameter."""
        if self._hooks is not None:
            self._hooks.gradient_arrived(param)

    def stored_changed(self) -> None:
        """Stored weights were written from outside: copies on the device are old."""
        self.residency.drop_all()

    def renew(self, unit: Unit, changed: Sequence[ParamRecord], arrivals: Sequence[Any]) -> None:
        """A unit's slices have new weights, or will when `arrivals` are there."""
        if not unit.stores_off_device and isinstance(self.source, RankWeights):
            self.residency.renew(unit, changed)
            self.source.follow_all(unit, arrivals)

    def take_over(self, units: Iterable[Unit] | None = None) -> None:
        """Let stored weights follow what the user wrote or assigned."""
        for unit in self._units if units is None else units:
            if not unit.streams_weights:
                continue
            was_away = unit.state is not WeightState.READY
            changed = [record for record in unit.records if refresh_master(record)]
            if changed and was_away:
                self.residency.drop_all([unit])

    def step_ended(self) -> None:
        """New weights are made: bring up what the next forward needs first."""
        self.residency.expect_forward()
        if self.activations is not None:
            self.activations.look()

    def detach(self) -> None:
        """Remove the hooks and give the pool back."""
        if self._hooks is not None:
            self._hooks.detach()
        self.residency.end_reading()
        if self.activations is not None:
            self.activations.close()
        if self._spool is not None:
            self._spool.close()
        self._reservation.release()
        self._between.release()
