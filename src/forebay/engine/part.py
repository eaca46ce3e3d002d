"""The memory of one part: working weights, master, moments, and the gradient's landing place.

One flat space of elements for every role (`model.layout`). It allocates and gives views; it
moves nothing. Weights that do not live on the device are `engine.weight_memory`'s.

[Note: storages] A parameter's weight is a tensor over the part's memory whose storage begins and
ends with it (through DLPack, which keeps the memory alive). Savers look at storages: safetensors'
`save_model` refuses tied weights that do not fill theirs, `torch.save` of one parameter would
write its whole unit, and `save_pretrained` would copy every weight first.
"""

from __future__ import annotations

import contextlib
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from forebay.engine.file_state import FileState
from forebay.engine.held_records import HeldRecords
from forebay.engine.homes import own_tensor
from forebay.engine.landing import GradientForm, Landing
from forebay.engine.rank_sums import RankSums
from forebay.engine.shares import answered_for, held_of, share_of
from forebay.engine.state_memory import PartMemory, StateMemory
from forebay.engine.weight_memory import WeightMemory
from forebay.model.layout import Segment
from forebay.optim.master import join, split_into
from forebay.plan.placement import MasterLayout, UpdatePlace, WeightPlace
from forebay.plan.policies import Delayed
from forebay.plan.records import records
from forebay.tiers.device import DeviceArena
from forebay.tiers.host import HostArena

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.engine.direct_weights import DirectRead
    from forebay.engine.readers import Reading
    from forebay.model.layout import ParamSlot, PartLayout
    from forebay.plan.placement import Placement

__all__ = ["TORCH_DTYPES", "PartStorage"]

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class PartStorage:
    """All memory of one part.

    Args:
        layout: The part's layout.
        placement: The model's placement.
        update: Where this part's unit updates.
        weights: Where its weights live.
        memory: Device, ledger and page-locking policy.
        held: Of a state in files, how many first records stay in memory.

    Attributes:
        weights: The working weights where they live, flat; empty where that is in files.
        weight_files: Those files.
        home: The parameters' memory on the device, where weights come and go.
        is_sharded: Whether no rank holds the whole weights.
        loads: Transfers that still read the weights where they live.
        squares: Sums of squares that still read the landed gradient.
    """

    def __init__(
        self,
        layout: PartLayout,
        *,
        placement: Placement,
        update: UpdatePlace,
        weights: WeightPlace,
        memory: PartMemory,
        held: int = 0,
    ) -> None:
        self.layout, self.update = layout, update
        self.shard = placement.sharding.state(layout)
        self.own = self.shard.inner(placement.sharding.own(layout))
        self.segments = {slot.index: self.shard.segment(slot) for slot in layout.slots}
        self.master = placement.master_layout(layout.dtype, update=update)
        self.dtype = TORCH_DTYPES[layout.dtype]
        self.device = memory.device
        self._memory = memory
        self.files = self._file_state(placement, held=held) if update is UpdatePlace.NVME else None
        self.loads: list[Any] = []
        self.direct_reads: list[DirectRead] = []
        self.squares: list[Any] = []
        # New weights beside a whole master, where they were not written over the gradient.
        self.rounded_apart: torch.Tensor | None = None
        self._own: dict[int, torch.Tensor] = {}
        self.on_host = update is not UpdatePlace.DEVICE
        # An update on the device leaves the weights as they are: they come into force later.
        self.shows_later = not self.on_host and isinstance(placement.policy, Delayed)
        # Updated on the device last time: what `high` mirrors of the weights is older than they.
        self.high_is_stale = False
        self._state = StateMemory(self.elements, self.master, update=update, memory=memory)
        self.stores_on_host = weights is WeightPlace.HOST
        # The weights themselves are (the high half of) the master.
        lies_apart = self.master is MasterLayout.WHOLE or self.files is not None
        lies_apart = lies_apart or not self.stores_on_host
        self._weights = WeightMemory(
            layout,
            placement=placement,
            place=weights,
            in_master=None if lies_apart else self._state.high,
            memory=memory,
        )
        self.home, self.weight_files = self._weights.home, self._weights.files
        self.is_sharded = weights is not WeightPlace.DEVICE and self.elements != layout.elements
        self.high_is_weight = self._state.high is None or not lies_apart
        self.rebind()
        self._landing: Landing | None = None
        # Where updates outlast their step: another one, and the last operation that touches it.
        self._other: tuple[Landing, Any] | None = None
        if self.on_host:
            is_native = placement.sends_addends or layout.dtype == "float32"
            form = GradientForm.NATIVE if is_native else GradientForm.FP32
            self._landing = self._new_landing(form)
            if isinstance(placement.policy, Delayed):
                self._other = self._new_landing(form), None
        self.sums = RankSums()
        # The last operation that touches the gradient's landing place; the next one follows it.
        self.ticket: Any = None
        # Whoever still reads the state; set while a checkpoint is written.
        self.reading: Reading | None = None

    def rebind(self) -> None:
        """See the memory that state and weights have now."""
        self._state.rebind()
        self.low, self.exp_avg = self._state.low, self._state.exp_avg
        self.exp_avg_sq = self._state.exp_avg_sq
        if self._weights.on_device is not None:
            self._own.clear()
        self.weights = self.own_weights = self._weights.flat
        if self.home is None:
            self.own_weights = self.weights[self.shard.start : self.shard.end]
        self.high = self.own_weights if self._state.high is None else self._state.high

    def adopt_state(
        self,
        high: torch.Tensor,
        low: torch.Tensor | None,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
    ) -> None:
        """The state lies elsewhere on the host from now on."""
        self._state.high, self._state.low = high, low
        self._state.exp_avg, self._state.exp_avg_sq = exp_avg, exp_avg_sq
        self.rebind()

    @property
    def device_arenas(self) -> list[DeviceArena]:
        """The part's memory on the device."""
        arenas = [*self._state.arenas, self._weights.on_device]
        return [arena for arena in arenas if isinstance(arena, DeviceArena)]

    @cached_property
    def update_segments(self) -> tuple[tuple[int, int], ...]:
        """(offset, elements) in the shard of each parameter, in the layout's order."""
        return tuple((segment.offset, segment.elements) for segment in self.segments.values())

    @property
    def elements(self) -> int:
        """Elements of the state that is held here: the part's, or this rank's shard of them."""
        return self.shard.elements

    def _file_state(self, placement: Placement, *, held: int) -> FileState:
        assert self._memory.files is not None
        if self.master is MasterLayout.SPLIT:
            self.master = MasterLayout.WHOLE
        piece, stay = placement.buffers.piece_elements, None
        if held:
            first = records(self.elements, piece_elements=piece)[:held]
            stay = HeldRecords(first, dtype=self.layout.dtype, memory=self._memory)
        names = [(slot.names[0], *self.segments[slot.index][:2]) for slot in self.layout.slots]
        return FileState(
            self.elements,
            names=names,
            piece_elements=piece,
            space=self._memory.files,
            held=stay,
        )

    def await_readers(self) -> None:
        """Return once master, moments and weights may change; call it before they do."""
        while self.direct_reads:
            self.direct_reads.pop().settle()
        if self.reading is not None:
            self.reading.wait()

    def _new_landing(self, form: GradientForm, arena: HostArena | None = None) -> Landing:
        return Landing(
            self.elements, dtype=self.layout.dtype, form=form, memory=self._memory, arena=arena
        )

    @property
    def landing(self) -> Landing:
        """Where the gradient lands (host parts only)."""
        assert self._landing is not None
        return self._landing

    @property
    def gradient_dtype(self) -> str:
        """Dtype of the landed gradient (host parts only)."""
        return self.landing.dtype

    @property
    def gradient_address(self) -> int:
        """Address of the landing place (host parts only)."""
        return self.landing.arena.address

    @contextlib.contextmanager
    def gradient_in(self, arena: HostArena) -> Iterator[None]:
        """Inside it, fp32 sums in `arena` are the gradient that updates use and write over."""
        own, self._landing = self._landing, self._new_landing(GradientForm.FP32, arena)
        try:
            yield
        finally:
            self._landing = own

    def gradient(self, slot: ParamSlot) -> torch.Tensor:
        """View of one parameter's landed gradient, as `view`."""
        return self.view(self.landing.flat(TORCH_DTYPES[self.gradient_dtype]), slot)

    def turn_over(self) -> None:
        """Change landing places: gradients land in the other one from now on."""
        assert self._other is not None
        mine = self.landing, self.ticket
        self._landing, self.ticket = self._other
        self._other = mine

    @property
    def last_tickets(self) -> list[Any]:
        """What may still touch a gradient or the state, in either landing place."""
        other = None if self._other is None else self._other[1]
        return [ticket for ticket in (self.ticket, other, *self.loads) if ticket is not None]

    @property
    def landings(self) -> list[Landing]:
        """Every landing place."""
        places = [self._landing, None if self._other is None else self._other[0]]
        return [place for place in places if place is not None]

    def prepare_sums(self) -> None:
        """Make landing places wide while nothing is in them (nor in use by any lane)."""
        for landing in self.landings:
            landing.prepare_sums()

    def drop_idle_spare(self) -> None:
        """Give back the narrow landing place if nothing reads it any more."""
        if self._landing is not None and (self.ticket is None or self.ticket.done):
            self._landing.drop_spare()

    def weight(self, slot: ParamSlot) -> torch.Tensor:
        """What one parameter is on the device, in its shape; see [Note: storages].

        Where weights live on the host it may have no memory at the moment.
        """
        return self.stored(slot) if self.home is None else self.home.tensor(slot)

    def stored(self, slot: ParamSlot) -> torch.Tensor:
        """One parameter's working weight where it lives; see [Note: storages].

        In its shape, or what this rank holds of it (`view`) where weights are sharded. A copy where
        it is in a file.
        """
        if self.weight_files is not None:
            segment = self.segments[slot.index]
            return self._shaped(self.read_own_weights(segment.offset, segment.end), slot)
        if self.is_sharded:
            return self.view(self.weights, slot)
        own = self._own.get(slot.index)
        if own is None:
            own = self._own[slot.index] = own_tensor(self.weights, slot)
        return own

    def store(self, slot: ParamSlot, value: torch.Tensor) -> None:
        """Write one parameter's working weight where it lives, given whole or as `view`."""
        self.await_readers()
        held = self.share(value.detach(), slot) if self.is_sharded else value.detach()
        if self.weight_files is None:
            self.stored(slot).copy_(held)
        else:
            self.write_own_weights(self.segments[slot.index].offset, held.reshape(-1))

    def read_own_weights(self, begin: int, end: int) -> torch.Tensor:
        """Elements of the weights whose state is held here: a view, or a copy from files."""
        return self.own_weights[begin:end] if self.home is None else self._weights.read(begin, end)

    def write_own_weights(self, begin: int, values: torch.Tensor) -> None:
        """Write such elements where they live, given flat."""
        if self.home is None:
            self.own_weights[begin : begin + values.numel()] = values.to(self.own_weights.device)
        else:
            self._weights.write(begin, values)

    def view(self, flat: torch.Tensor, slot: ParamSlot) -> torch.Tensor:
        """What a flat role of the shard holds of a parameter: in its shape, or flat if not all."""
        return held_of(flat, slot, segment=self.segments[slot.index])

    def held_shape(self, slot: ParamSlot) -> tuple[int, ...]:
        """The shape of `view`."""
        held = self.segments[slot.index].elements
        return tuple(slot.shape) if held == slot.elements else (held,)

    def _shaped(self, held: torch.Tensor, slot: ParamSlot) -> torch.Tensor:
        return held.view(slot.shape) if held.numel() == slot.elements else held

    def read(self, role: str, begin: int, end: int) -> torch.Tensor:
        """Elements of the master (where it is whole) or of a moment, as `plan.records.ROLES`.

        A view where the role lies in memory, a copy where it lies in a file.
        """
        if self.files is not None:
            return self.files.read(role, begin, end)
        return self._flat(role)[begin:end]

    def write(self, role: str, begin: int, values: torch.Tensor) -> None:
        """Write elements of a role as `read` knows them; values are flat, in any dtype."""
        if self.files is not None:
            self.files.write(role, begin, values)
        else:
            self._flat(role)[begin : begin + values.numel()] = values

    def _flat(self, role: str) -> torch.Tensor:
        flats = {"master": self.high, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return flats[role]

    def state(self, role: str, slot: ParamSlot) -> torch.Tensor:
        """What is held of one parameter's role, as `read`, in the form of `view`."""
        segment = self.segments[slot.index]
        return self._shaped(self.read(role, segment.offset, segment.end), slot)

    def set_state(self, role: str, slot: ParamSlot, value: torch.Tensor) -> None:
        """Write what is held of one parameter's role, given in the form of `view`."""
        self.await_readers()
        self.write(role, self.segments[slot.index].offset, value.detach().reshape(-1))

    def own_segment(self, slot: ParamSlot) -> Segment:
        """What no other rank answers for of a parameter; offsets are those of the shard."""
        return answered_for(self.segments[slot.index], own=self.own)

    def share(self, value: torch.Tensor, slot: ParamSlot) -> torch.Tensor:
        """What the shard holds of a parameter-shaped tensor (or of that), in the form of `view`."""
        return share_of(value, slot, segment=self.segments[slot.index])

    def master_copy(self, slot: ParamSlot) -> torch.Tensor:
        """A copy of what is held of one parameter's fp32 master, in the form of `view`."""
        self.sync_high()
        if self.low is None:
            return self.state("master", slot).detach().clone()
        return join(self.view(self.high, slot), self.view(self.low, slot))

    def set_master(self, slot: ParamSlot, value: torch.Tensor) -> None:
        """Write what is held of one parameter's fp32 master, given whole.

        The working weight on the device is not touched. Only where the master does not lie in
        the working weight itself. Temporary memory is bounded, whatever the parameter's size.
        """
        self.await_readers()
        self.sync_high()
        segment = self.segments[slot.index]
        flat = self.share(value.detach(), slot).reshape(-1)
        if self.low is None:
            self.write("master", segment.offset, flat)
            return
        high = self.high[segment.offset : segment.end]
        low = self.low[segment.offset : segment.end]
        split_into(high, low, flat)

    def sync_high(self) -> None:
        """Copy the weights over their mirror on the host, where the device updated them last."""
        if self.high_is_stale:
            self.high.copy_(self.own_weights)
            self.high_is_stale = False

    def close(self) -> None:
        """Let go of all memory once nobody reads it; weights live on while parameters view them."""
        self.await_readers()
        self._own.clear()
        if self.home is not None:
            # The garbage collector may take long to find an engine whose device memory is wanted.
            self.home.close()
        for arena in [*self._state.arenas, *self.landings]:
            if arena is not None:
                arena.close()
        self._weights.close()
        if self.files is not None:
            self.files.close()
        self._state.forget()
        self.rebind()
