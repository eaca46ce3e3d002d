"""One unit at run time: its memory, its parameters, and whether its weights may be read.

[Note: pending weights] From `step()` until its new weights have arrived, a unit's parameters
view a NaN scalar expanded to their shape: a read gives NaN, most writes raise, and the swap
costs a pointer. Whoever computes with such a NaN gets a gradient for a pending parameter, which
the collector refuses by name. `fill_` and `zero_` pass through an expanded tensor. The version
counter shows that when the real weights come back, unless it went through `p.data`; for those
the scalar itself is looked at in the next step.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from forebay.errors import PendingWeightError, RankError, TransferError
from forebay.model.unbuilt import UnbuiltWeight, value_of
from forebay.plan.placement import Accumulation, UpdatePlace, WeightPlace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.accelerators.base import Accelerator
    from forebay.engine.part import PartStorage
    from forebay.engine.policy import UpdatePolicy
    from forebay.engine.record import ParamRecord
    from forebay.engine.streamer import StagedPart
    from forebay.plan.placement import UnitPlacement

__all__ = ["NanSource", "Unit", "WeightState"]


# Weights that share the memory of what they show while they are away.
_ROW = 256


class WeightState(Enum):
    """Whether a unit's working weights may be read."""

    READY = "ready"
    """They are the newest weights, in the order of the compute stream."""
    PENDING = "pending"
    """New ones are on their way; see [Note: pending weights]."""
    AWAY = "away"
    """They live elsewhere and are not on the device now; parameters view NaN as if pending."""


class NanSource:
    """NaN scalars by dtype on one device, and views of them in any shape.

    Attributes:
        storages: Identities of the memory of those that are some weight's own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scalars: dict[torch.dtype, torch.Tensor] = {}
        # Of parameters with one element: a write would pass through a shared scalar to all.
        self._private: list[torch.Tensor] = []
        self._views: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}
        # Rows of which each weight that comes and goes has one element: a read tells whose it was.
        self._rows: list[torch.Tensor] = []
        self._free: dict[torch.dtype, list[torch.Tensor]] = {}
        self.storages: set[int] = set()

    def view(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A NaN tensor of stride 0, so that most writes raise."""
        known = self._views.get((tuple(shape), dtype))
        if known is not None:
            return known
        scalar = self._scalars.get(dtype)
        if scalar is None:
            scalar = torch.full((), float("nan"), dtype=dtype, device=self._device)
            self._scalars[dtype] = scalar
        if math.prod(shape) == 1:
            scalar = scalar.clone()
            self._private.append(scalar)
            return scalar.expand(tuple(shape))
        view = self._views[tuple(shape), dtype] = scalar.expand(tuple(shape))
        return view

    def own(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """`view`, of a scalar that nobody else views."""
        free = self._free.setdefault(dtype, [])
        if not free:
            row = torch.full((_ROW,), float("nan"), dtype=dtype, device=self._device)
            self._rows.append(row)
            self.storages.add(row.untyped_storage()._cdata)
            free.extend(row.unbind())
        return free.pop().expand(tuple(shape))

    def is_view(self, data: torch.Tensor) -> bool:
        """Whether a tensor is (a view of) a NaN of this source."""
        address = data.data_ptr()
        # asked anew each time: `share_memory_()` moves a scalar
        if any(address == nan.data_ptr() for nan in (*self._scalars.values(), *self._private)):
            return True
        return any(0 <= address - row.data_ptr() < row.nbytes for row in self._rows)

    def check(self) -> None:
        """Raise PendingWeightError when someone wrote through a view; waits for the device."""
        private, self._private = self._private, []
        shared = [*self._scalars.values(), *self._rows]
        looked_at = [nan.float().reshape(-1) for nan in shared + private]
        if not shared or torch.cat(looked_at).isnan().all():
            return
        for nan in shared:
            nan.fill_(float("nan"))
        raise _written_while_pending("a parameter")


def _written_while_pending(label: str) -> PendingWeightError:
    """The error for a write that the arriving weights undo."""
    return PendingWeightError(
        f"{label} was written while its value was not on the device, or a new one was on its way "
        "there",
        hint="change weights inside forebay.zero.GatheredParameters, or after "
        "optimizer.synchronize() where they stay on the device between steps",
    )


def assigned_nan(label: str) -> PendingWeightError:
    """The error for NaN that was assigned to `p.data` while that showed NaN.

    `model.half()`, or `p.data = p.data.clone()`: it was made from what was not there.
    """
    return PendingWeightError(
        f"{label} was assigned NaN, which it showed while its value was not on the device: it was "
        "converted, moved or copied meanwhile, and is as it was before",
        hint="call optimizer.synchronize() first, and read weights that live on the host inside "
        "forebay.zero.GatheredParameters",
    )


class Unit:
    """A unit's memory and parameters.

    Attributes:
        placement: Its layout and where it updates.
        parts: Its memory, one part per dtype.
        records: Its parameters, all parts.
        remaining: Parameters whose firings in the present backward are still expected.
        departed: Whether its gradient of the present backward has left.
        staging: Its state on the device, during a visit.
        updated: Whether its update of this window began before `step()`.
        accumulation: How addends are summed if the unit updates on the host.
        eager: Whether `step()` waits for its weights, since no hook would.
        was_used: Whether its weights, which live on the host, were used since they last changed.
        on_arrival: Completes new weights once they have arrived, in the order of the compute
            stream.
    """

    def __init__(
        self,
        placement: UnitPlacement,
        *,
        parts: Sequence[PartStorage],
        records: Sequence[Sequence[ParamRecord]],
        accumulation: Accumulation,
    ) -> None:
        self.placement = placement
        self.accumulation = accumulation
        self.index = placement.layout.index
        self.name = placement.layout.name
        self.parts = tuple(parts)
        self.records_of_part = tuple(tuple(members) for members in records)
        self.records = tuple(record for members in records for record in members)
        self.remaining = 0
        self.departed = False
        self.updated = False
        self.eager = False
        self.was_used = False
        self.staging: list[StagedPart] | None = None
        self.on_arrival: Callable[[], None] | None = None
        self._policy: UpdatePolicy | None = None
        for record in self.records:
            record.on_rebase = self._rebased
        self.state = WeightState.READY
        self._arrivals: list[Any] = []
        self._swapped: list[ParamRecord] = []

    def follow(self, policy: UpdatePolicy) -> None:
        """Tell a policy whose master and weight were set from outside of updates."""
        self._policy = policy
        for record in self.records:
            record.holds_back = policy.holds_back

    def _rebased(self, record: ParamRecord) -> None:
        # what came up for the update is older; the gradient lands and the host updates
        self.staging = None
        if self._policy is not None:
            self._policy.master_changed(record)

    @property
    def updates_on_device(self) -> bool:
        """Whether this window's gradient stays on the device, as far as known now."""
        return self.placement.update is UpdatePlace.DEVICE or self.staging is not None

    @property
    def sums_on_host(self) -> bool:
        """Whether addends leave one by one and are summed on the host, as far as known now."""
        return self.accumulation is Accumulation.HOST_SUM and not self.updates_on_device

    @property
    def streams_weights(self) -> bool:
        """Whether its weights live elsewhere and come to the device for use."""
        return self.placement.weights is not WeightPlace.DEVICE

    @property
    def stores_off_device(self) -> bool:
        """Whether its weights (or this rank's slices) live on the host or in files."""
        return self.placement.weights.is_off_device

    def bind(self, record: ParamRecord) -> None:
        """Move one parameter's values into the unit's memory.

        Args:
            record: The parameter.
        """
        part, slot, param = record.part, record.slot, record.param
        value = value_of(param)
        if isinstance(param, UnbuiltWeight):
            # Its kind of tensor cannot change in place; the parameter stays the same object. `data`
            # has a version of its own: what fills the weight later is no write of the user's.
            there = torch.nn.Parameter(part.weight(slot).data, requires_grad=param.requires_grad)
            torch.utils.swap_tensors(param, there)
        with torch.no_grad():
            part.store(slot, value)
        param.data = part.weight(slot) if part.weight_files is not None else part.stored(slot)

    def leave(self, nans: NanSource) -> None:
        """The weights' memory on the device is going: parameters view NaN instead."""
        self.state = WeightState.AWAY
        for record in self.records:
            if record.away is None:
                record.away = nans.own(record.slot.shape, record.part.dtype)
            record.pending = True
            record.param.data = record.away

    def arrive(self) -> None:
        """The weights are in their memory on the device: parameters are those again.

        Raises:
            PendingWeightError: Someone wrote into the NaN that they viewed.
        """
        written = [r for r in self.records if r.param._version != r.version]
        self.state = WeightState.READY
        for record in self.records:
            record.pending = False
            record.param.data = record.part.weight(record.slot)
        if written:
            _mark_changed(written)
            raise _written_while_pending(written[0].label)

    def hide(self, nans: NanSource) -> None:
        """The weights' memory leaves the device for a while: parameters view NaN."""
        if self.state is not WeightState.READY:
            return
        self.state = WeightState.PENDING
        for record in self.records:
            record.pending = True
            record.param.data = nans.view(record.slot.shape, record.part.dtype)

    def show(self, nans: NanSource) -> None:
        """The weights are as they were before `hide`, perhaps elsewhere; see `make_ready`.

        Raises:
            PendingWeightError: Someone assigned NaN.
        """
        self.state = WeightState.READY
        _uncover(self.records, nans)

    def mark_changed(self, records: Sequence[ParamRecord]) -> None:
        """Stored weights have new values: graphs of the old ones fail, as in torch."""
        _mark_changed(records)

    def await_weights(
        self, records: Sequence[ParamRecord], arrivals: Sequence[Any], nans: NanSource
    ) -> None:
        """Make `records` unreadable until `arrivals` are done."""
        self.state = WeightState.PENDING
        self._arrivals = list(arrivals)
        self._swapped = list(records)
        for record in records:
            record.pending = True
            record.param.data = nans.view(record.slot.shape, record.part.dtype)
        # A graph built before the step saved what is being overwritten: it must fail, as in torch.
        _mark_changed(records)

    def make_ready(self, accelerator: Accelerator, nans: NanSource) -> None:
        """Order the caller's computation after the arrival of the newest weights.

        A tensor that the user assigned to `p.data` in the meantime stays, and becomes the weight.

        Raises:
            TransferError: An update or a copy failed; the weights stay unreadable.
            PendingWeightError: Someone wrote into the weights in between, or assigned NaN.
        """
        if self.state is not WeightState.PENDING:
            return
        for ticket in self._arrivals:
            try:
                accelerator.wait_for(ticket)
            except RankError:
                raise
            except RuntimeError as error:
                raise TransferError(
                    f"the update of unit {self.name} failed: {error}",
                    hint="weights and optimizer state are not usable any more; go back to the "
                    "last checkpoint",
                ) from error
        if self.on_arrival is not None:
            self.on_arrival()
        written = [r for r in self._swapped if r.param._version != r.version]
        swapped, self._swapped, self._arrivals = self._swapped, [], []
        self.state = WeightState.READY
        try:
            _uncover(swapped, nans)
        finally:
            _mark_changed(swapped)
        if written:
            raise _written_while_pending(written[0].label)

    def poison(self, nans: NanSource) -> None:
        """Make all weights unreadable for good: some may be new and some old."""
        self.state = WeightState.PENDING
        self._swapped = list(self.records)
        for record in self.records:
            record.pending = True
            record.param.data = nans.view(record.slot.shape, record.part.dtype)
        for part in self.parts:
            if part.home is not None:
                part.home.empty()


def _uncover(records: Sequence[ParamRecord], nans: NanSource) -> None:
    """Let parameters be their weights again, but for those that were assigned another tensor."""
    wrong = []
    for record in records:
        if record.pending and record.slot.elements and not nans.is_view(record.param):
            record.pending = False
            if not record.param.isnan().any():
                continue
            wrong.append(record.label)
        record.pending = False
        record.param.data = record.part.weight(record.slot)
    if wrong:
        raise assigned_nan(wrong[0])


def _mark_changed(records: Sequence[ParamRecord]) -> None:
    torch.autograd.graph.increment_version([record.param for record in records])
    for record in records:
        record.version = record.param._version
