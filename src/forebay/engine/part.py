"""The memory of one part: working weights, master, moments, and the gradient's landing place.

One flat space of elements for every role (`model.layout`). It allocates and gives views; it
moves nothing. Where weights live on the host, `weights` is there and parameters are tensors of a
`WeightHome`, whose memory comes and goes.

[Note: storages] A parameter's weight is a tensor over the part's memory whose storage begins and
ends with it (through DLPack, which keeps the memory alive). Savers look at storages: safetensors'
`save_model` refuses tied weights that do not fill theirs, `torch.save` of one parameter would
write its whole unit, and `save_pretrained` would copy every weight first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.dlpack import from_dlpack

from forebay.engine.homes import WeightHome
from forebay.engine.rank_sums import RankSums
from forebay.model.layout import ITEM_BYTES
from forebay.optim.master import join, split
from forebay.plan.placement import MasterLayout, UpdatePlace, WeightPlace
from forebay.tiers.device import DeviceArena
from forebay.tiers.host import HostArena
from forebay.tiers.ledger import Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.accelerators.base import Accelerator
    from forebay.model.layout import ParamSlot, PartLayout
    from forebay.plan.placement import Placement
    from forebay.tiers.ledger import Ledger
    from forebay.tiers.page_locking import PageLocking

__all__ = ["TORCH_DTYPES", "GradientForm", "PartMemory", "PartStorage", "state_item_bytes"]

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# Splitting a master takes some 24 bytes of temporary memory per element: 24 MiB at once.
_CHUNK_ELEMENTS = 1 << 20


class GradientForm(Enum):
    """In what dtype a part's gradient lies on the host."""

    NATIVE = "native"
    """The working dtype: each parameter has one addend."""
    FP32 = "fp32"
    """fp32 sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartMemory:
    """Where a part's memory comes from."""

    accelerator: Accelerator
    ledger: Ledger
    page_locking: PageLocking | None

    @property
    def device(self) -> torch.device:
        """Where weights and activations are computed with."""
        return self.accelerator.device

    def host_arena(self, nbytes: int, *, role: Role, what: str) -> HostArena:
        """An arena that the link copies from or to."""
        return HostArena(
            nbytes, ledger=self.ledger, role=role, what=what, page_locking=self.page_locking
        )


class _State:
    """Master and moments of a part: flat tensors on the host or on the device.

    `high` is the bf16 half in split layout, the fp32 master otherwise; None where the working
    weight is its own master and lies on the device.
    """

    def __init__(
        self, elements: int, master: MasterLayout, *, update: UpdatePlace, memory: PartMemory
    ) -> None:
        self.arenas: list[HostArena | DeviceArena] = []
        n, what = elements, f"{elements} parameters"
        self.high: torch.Tensor | None = None
        self.low: torch.Tensor | None = None
        if update is not UpdatePlace.DEVICE:
            visits = update is UpdatePlace.STREAMED
            # Only what crosses the link is locked, which takes 0.7 s per GiB: all of it on visits,
            # else the half that is the new weight (a whole master's is written over the gradient).
            crossing = {
                MasterLayout.WEIGHT: 4 * n,
                MasterLayout.SPLIT: 4 * n if visits else 2 * n,
                MasterLayout.WHOLE: 4 * n if visits else 0,
            }
            hp = self._host(4 * n, Role.HP_PARAMS, f"masters of {what}", memory)
            if master is MasterLayout.SPLIT:
                self.high = hp.tensor(torch.bfloat16, offset_bytes=0, elements=n)
                self.low = hp.tensor(torch.int16, offset_bytes=2 * n, elements=n)
            else:
                self.high = hp.tensor(torch.float32, offset_bytes=0, elements=n)
            moments = self._host(8 * n, Role.OPTIM_STATES, f"moments of {what}", memory)
            if memory.page_locking is not None:
                hp.lock(memory.page_locking, nbytes=crossing[master])
                moments.lock(memory.page_locking, nbytes=8 * n if visits else 0)
            self.exp_avg = moments.tensor(torch.float32, offset_bytes=0, elements=n)
            self.exp_avg_sq = moments.tensor(torch.float32, offset_bytes=4 * n, elements=n)
            return
        if master is MasterLayout.SPLIT:
            self.low = self._device(n, torch.int16, Role.HP_PARAMS, f"masters of {what}", memory)
        elif master is MasterLayout.WHOLE:
            self.high = self._device(n, torch.float32, Role.HP_PARAMS, f"masters of {what}", memory)
        self.exp_avg, self.exp_avg_sq = (
            self._device(n, torch.float32, Role.OPTIM_STATES, f"{name} of {what}", memory)
            for name in ("first moments", "second moments")
        )

    def _host(self, nbytes: int, role: Role, what: str, memory: PartMemory) -> HostArena:
        arena = HostArena(nbytes, ledger=memory.ledger, role=role, what=what)
        self.arenas.append(arena)
        return arena

    def _device(
        self, elements: int, dtype: torch.dtype, role: Role, what: str, memory: PartMemory
    ) -> torch.Tensor:
        arena = DeviceArena(
            elements,
            dtype=dtype,
            device=memory.device,
            ledger=memory.ledger,
            role=role,
            what=what,
        )
        self.arenas.append(arena)
        return arena.flat


class PartStorage:
    """All memory of one part.

    Args:
        layout: The part's layout.
        placement: The model's placement.
        update: Where this part's unit updates.
        weights: Where its weights live.
        memory: Device, ledger and page-locking policy.

    Attributes:
        weights: The working weights where they live, flat.
        home: The parameters' memory on the device, where weights live on the host.
        loads: Transfers that still read the weights on the host.
    """

    def __init__(
        self,
        layout: PartLayout,
        *,
        placement: Placement,
        update: UpdatePlace,
        weights: WeightPlace,
        memory: PartMemory,
    ) -> None:
        self.layout = layout
        self.shard = placement.sharding.state(layout)
        self.own = self.shard.inner(placement.sharding.own(layout))
        self.segments = {slot.index: self.shard.segment(slot) for slot in layout.slots}
        self.update = update
        self.master = placement.master_layout(layout.dtype)
        self.dtype = TORCH_DTYPES[layout.dtype]
        self.device = memory.device
        self._memory = memory
        self.home: WeightHome | None = None
        self.loads: list[Any] = []
        self._weights: DeviceArena | HostArena | None = None
        self._own: dict[int, torch.Tensor] = {}
        self.on_host = update is not UpdatePlace.DEVICE
        # Updated on the device last time: what `high` mirrors of the weights is older than they.
        self.high_is_stale = False
        self._state = _State(self.elements, self.master, update=update, memory=memory)
        self.low = self._state.low
        self.exp_avg = self._state.exp_avg
        self.exp_avg_sq = self._state.exp_avg_sq
        self.weights = self._place_weights(weights)
        streams = weights is WeightPlace.HOST
        self.own_weights = self.weights
        if not streams:
            self.own_weights = self.weights[self.shard.start : self.shard.end]
        # The weights themselves are (the high half of) the master.
        lies_apart = not streams or self.master is MasterLayout.WHOLE
        self.high_is_weight = self._state.high is None or not lies_apart
        self.high = self.own_weights if self._state.high is None else self._state.high
        self.gradient_form = (
            GradientForm.NATIVE
            if placement.sends_addends or layout.dtype == "float32"
            else GradientForm.FP32
        )
        self._gradient: HostArena | None = None
        self.spare: HostArena | None = None
        if self.on_host:
            self._gradient = self._gradient_arena(self.gradient_form)
        self.sums = RankSums()
        # The last operation that touches the gradient's landing place; the next one follows it.
        self.ticket: Any = None
        # Waits for whoever still reads the state; set while a checkpoint is written.
        self.before_change: Callable[[], None] | None = None

    @property
    def update_segments(self) -> tuple[tuple[int, int], ...]:
        """(offset, elements) in the shard of each parameter, in the layout's order."""
        return tuple((segment.offset, segment.elements) for segment in self.segments.values())

    @property
    def elements(self) -> int:
        """Elements of the state that is held here: the part's, or this rank's shard of them."""
        return self.shard.elements

    def _place_weights(self, place: WeightPlace) -> torch.Tensor:
        """Make the working weights' memory; none where they are the high half of the master."""
        what = f"weights of {self.layout.elements} parameters"
        if place is WeightPlace.DEVICE:
            self._weights = DeviceArena(
                self.layout.elements,
                dtype=self.dtype,
                device=self.device,
                ledger=self._memory.ledger,
                role=Role.LP_PARAMS,
                what=what,
            )
            return self._weights.flat
        self.home = WeightHome(self.layout, dtype=self.dtype, accelerator=self._memory.accelerator)
        if self.master is not MasterLayout.WHOLE:
            assert self._state.high is not None
            return self._state.high
        self._weights = self._memory.host_arena(
            self.elements * self.dtype.itemsize, role=Role.LP_PARAMS, what=what
        )
        return self._weights.tensor(self.dtype, offset_bytes=0, elements=self.elements)

    def await_readers(self) -> None:
        """Return once master, moments and weights may change; call it before they do."""
        if self.before_change is not None:
            self.before_change()

    def _gradient_arena(self, form: GradientForm) -> HostArena:
        native = form is GradientForm.NATIVE
        item = ITEM_BYTES[self.layout.dtype] if native else 4
        return self._memory.host_arena(
            item * self.elements,
            role=Role.LP_GRADS if native else Role.CONTIGUOUS_GRAD_BUFFER,
            what=f"gradients of {self.elements} parameters",
        )

    @property
    def gradient_dtype(self) -> str:
        """Dtype of the landed gradient."""
        return self.layout.dtype if self.gradient_form is GradientForm.NATIVE else "float32"

    @property
    def gradient_address(self) -> int:
        """Address of the landing place (host parts only)."""
        assert self._gradient is not None
        return self._gradient.address

    def gradient(self, slot: ParamSlot) -> torch.Tensor:
        """View of one parameter's landed gradient, as `view`."""
        assert self._gradient is not None
        dtype = TORCH_DTYPES[self.gradient_dtype]
        flat = self._gradient.tensor(dtype, offset_bytes=0, elements=self.elements)
        return self.view(flat, slot)

    def widen_gradient(self) -> int:
        """Give the gradient fp32 room; returns the address of the native landing place.

        The narrow place is kept in `spare` until `drop_spare`, since its bytes are still to be
        added. Raises BudgetError where the wide one does not fit.
        """
        assert self._gradient is not None
        wide = self._gradient_arena(GradientForm.FP32)
        self.spare, self._gradient = self._gradient, wide
        self.gradient_form = GradientForm.FP32
        return self.spare.address

    def prepare_sums(self) -> None:
        """Make the landing place wide while nothing is in it (nor in use by any lane)."""
        if self.on_host and self.gradient_form is GradientForm.NATIVE and self.dtype.itemsize < 4:
            self.widen_gradient()
        self.drop_spare()

    def drop_idle_spare(self) -> None:
        """Give back the narrow landing place if nothing reads it any more."""
        if self.spare is not None and (self.ticket is None or self.ticket.done):
            self.drop_spare()

    def drop_spare(self) -> None:
        """Give back the narrow landing place."""
        if self.spare is not None:
            self.spare.close()
            self.spare = None

    def weight(self, slot: ParamSlot) -> torch.Tensor:
        """What one parameter is on the device, in its shape; see [Note: storages].

        Where weights live on the host it may have no memory at the moment.
        """
        return self.stored(slot) if self.home is None else self.home.tensor(slot)

    def stored(self, slot: ParamSlot) -> torch.Tensor:
        """One parameter's working weight where it lives, in its shape; see [Note: storages]."""
        own = self._own.get(slot.index)
        if own is None:
            own = self.weights[slot.offset : slot.end].view(slot.shape)
            if slot.elements:
                own = from_dlpack(own)
            self._own[slot.index] = own
        return own

    def view(self, flat: torch.Tensor, slot: ParamSlot) -> torch.Tensor:
        """What a flat role of the shard holds of a parameter: in its shape, or flat if not all."""
        segment = self.segments[slot.index]
        held = flat[segment.offset : segment.end]
        return held.view(slot.shape) if segment.elements == slot.elements else held

    def share(self, value: torch.Tensor, slot: ParamSlot) -> torch.Tensor:
        """What the shard holds of a parameter-shaped tensor, in the form of `view`."""
        segment = self.segments[slot.index]
        if segment.elements == slot.elements:
            return value.reshape(slot.shape)
        return value.reshape(-1)[segment.start : segment.start + segment.elements]

    def master_copy(self, slot: ParamSlot) -> torch.Tensor:
        """A copy of what is held of one parameter's fp32 master, in the form of `view`."""
        self.sync_high()
        high = self.view(self.high, slot)
        if self.low is None:
            return high.detach().clone()
        return join(high, self.view(self.low, slot))

    def set_master(self, slot: ParamSlot, value: torch.Tensor) -> None:
        """Write what is held of one parameter's fp32 master, given whole.

        The working weight on the device is not touched. Only where the master does not lie in
        the working weight itself. Temporary memory is bounded, whatever the parameter's size.
        """
        self.sync_high()
        segment = self.segments[slot.index]
        high = self.high[segment.offset : segment.end]
        low = None if self.low is None else self.low[segment.offset : segment.end]
        flat = self.share(value.detach(), slot).reshape(-1)
        if low is not None and flat.dtype is torch.bfloat16:
            high.copy_(flat)
            low.zero_()
            return
        for start in range(0, segment.elements, _CHUNK_ELEMENTS):
            chunk = slice(start, start + _CHUNK_ELEMENTS)
            single = flat[chunk].to(device=high.device, dtype=torch.float32)
            if low is None:
                high[chunk] = single
            else:
                high[chunk], low[chunk] = split(single)

    def sync_high(self) -> None:
        """Copy the weights over their mirror on the host, where the device updated them last."""
        if self.high_is_stale:
            self.high.copy_(self.own_weights)
            self.high_is_stale = False

    def close(self) -> None:
        """Let go of all memory; the weights live on while parameters view them."""
        self._own.clear()
        arenas = [*self._state.arenas, self._weights, self._gradient, self.spare]
        for arena in arenas:
            if arena is not None:
                arena.close()
        self.weights = self.own_weights = self.high = torch.empty(0)
        self.exp_avg = self.exp_avg_sq = torch.empty(0)
        self._state.high = self.low = None
        self._state.exp_avg = self._state.exp_avg_sq = torch.empty(0)
        self._state.low = None


def state_item_bytes(part: PartStorage) -> int:
    """Bytes per element of a part's state that a visit to the device moves each way."""
    own = 0 if part.home is None else part.dtype.itemsize
    if part.low is not None:
        return 10 + own
    return own + (12 if part.master is MasterLayout.WHOLE else 8)
