"""What an engine is asked to do: frozen values, whichever face they came through."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from forebay.comm.exchange import Exchange
from forebay.links.observer import NO_OBSERVER
from forebay.optim.loss_scale import StaticLossScale
from forebay.plan.load_rules import LoadRules
from forebay.plan.placement import AccumulationOrder, Sharding, SixteenBitMaster, WeightPlace
from forebay.plan.policies import EXACT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn

    from forebay.comm.group import Group
    from forebay.engine.file_space import NvmeOptions
    from forebay.links.fake import FaultScript
    from forebay.links.observer import Observer
    from forebay.model.spec import ModelSpec
    from forebay.optim.loss_scale import LossScale
    from forebay.plan.placement import UpdatePlace
    from forebay.plan.policies import Policy
    from forebay.plan.solve import Rates

__all__ = ["ActivationPlace", "EngineOptions", "OverflowCheck", "SumPlace", "Timing"]


class Timing(Enum):
    """Whether `step()` returns before the weights are new."""

    DEFERRED = "deferred"
    """It does; each unit's next forward waits for that unit alone."""
    SYNCHRONOUS = "synchronous"
    """`step()` waits for everything."""


class ActivationPlace(Enum):
    """Where what checkpointing keeps of a forward waits for the backward."""

    DEVICE = "device"
    """Where it is."""
    HOST = "host"
    """On the host: down behind the forward, up ahead of the backward."""


class SumPlace(Enum):
    """Where addends of several backwards are summed for units that update on the host."""

    DEVICE = "device"
    HOST = "host"


class OverflowCheck(Enum):
    """Whether a gradient that is not finite skips the update."""

    SKIP = "skip"
    OFF = "off"


def _nobody(_device: torch.device) -> Observer:
    return NO_OBSERVER


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of one engine.

    Attributes:
        device: The device that computes; None for the current accelerator.
        update: Where every unit's state lives and updates; None lets the planner choose for
            state in host memory: on the host alone where the device has no link of its own, else
            part of it streamed.
        places: Chooses the update place of every unit of a model, before `update`.
        weights: Where the working weights of units that do not update on the device live.
        pool_bytes: Device bytes that weights on the host share while they are used; None for what
            the device budget leaves, or a default without one.
        loads: What else bounds weights that come and go.
        activations: Where the inputs of checkpointed regions wait for the backward.
        staging_bytes: Device bytes for state that visits; None for what activations leave free.
        cast_to: What float32 parameters become when forebay takes over; None leaves them.
        clip_norm: Bound on the global gradient norm; None does not clip.
        backwards: Backwards per update where the caller knows; None learns it.
        sum_place: Where several backwards are summed.
        order: In which order a window's micro-batches pass the model.
        unit_elements: Elements per unit; None lets units follow the module tree.
        whole_modules: Modules whose parameters stay in one unit.
        timing: Deferred or synchronous.
        overflow: Whether a non-finite gradient skips the update.
        loss_scale: The loss scale that gradients carry.
        device_budget: Bytes that may be placed on the device; None for no bound.
        host_budget: Bytes that may be placed on the host, by all ranks of a machine together;
            None for what the machine has.
        save_bytes: Of `host_budget`, what each rank leaves free for the blocks of a checkpoint.
        threads: Update threads; None for one on each core that is not left to the launching
            thread.
        core_share: Share of this process's cores that update, where `threads` does not say.
        page_lock: Whether host memory is page-locked.
        bf16_master: Layout of masters behind bf16 weights.
        piece_elements: Elements of one piece of an update.
        rates: The machine's bandwidths, for choosing places; None takes typical ones.
        observe: Makes what watches the engine, given its device.
        fault: Scripted delays and faults of the link.
        group: The ranks that train together; None for this process alone.
        exchange: How gradients go between ranks.
        stage: What is sharded over them; see `forebay.plan.Sharding`.
        nvme: Files for the state that host memory has no room for; None keeps all of it there.
        policy: When units update; exact updates run during backward where that is legal.
    """

    device: torch.device | str | None = None
    update: UpdatePlace | None = None
    places: Callable[[ModelSpec], Sequence[UpdatePlace]] | None = None
    weights: WeightPlace = WeightPlace.DEVICE
    pool_bytes: int | None = None
    loads: LoadRules = field(default_factory=LoadRules)
    activations: ActivationPlace = ActivationPlace.DEVICE
    staging_bytes: int | None = None
    cast_to: torch.dtype | None = None
    clip_norm: float | None = None
    backwards: int | None = None
    sum_place: SumPlace = SumPlace.HOST
    order: AccumulationOrder = AccumulationOrder.MICROBATCH
    unit_elements: int | None = None
    whole_modules: Sequence[nn.Module] = ()
    timing: Timing = Timing.DEFERRED
    overflow: OverflowCheck = OverflowCheck.SKIP
    loss_scale: LossScale = field(default_factory=StaticLossScale)
    device_budget: int | None = None
    host_budget: int | None = None
    save_bytes: int = 0
    threads: int | None = None
    core_share: float | None = None
    page_lock: bool = True
    bf16_master: SixteenBitMaster = SixteenBitMaster.SPLIT
    piece_elements: int = 4 << 20
    rates: Rates | None = None
    observe: Callable[[torch.device], Observer] = _nobody
    fault: FaultScript | None = None
    group: Group | None = None
    exchange: Exchange = field(default_factory=Exchange)
    stage: int = 0
    nvme: NvmeOptions | None = None
    policy: Policy = EXACT

    @property
    def backwards_per_update(self) -> int:
        """Backwards of a window as far as known; in layer order it is one of all micro-batches."""
        return 1 if self.order is AccumulationOrder.LAYER else self.backwards or 1

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one backward."""
        return self.backwards or 1 if self.order is AccumulationOrder.LAYER else 1

    @property
    def streams_frozen(self) -> bool:
        """Whether frozen weights live where trained ones do: on the host, or spread over ranks."""
        return self.weights is not WeightPlace.DEVICE or self.spreads_weights

    @property
    def spreads_weights(self) -> bool:
        """Whether no rank has all weights."""
        return self.sharding.size > 1 and self.stage == 3

    @property
    def own_host_budget(self) -> int | None:
        """This rank's part of the host budget."""
        if self.host_budget is None or self.group is None:
            return self.host_budget
        return self.host_budget // self.group.local_size

    @property
    def own_state_budget(self) -> int | None:
        """Of it, what state may take."""
        own = self.own_host_budget
        return None if own is None else max(0, own - self.save_bytes)

    @property
    def sharding(self) -> Sharding:
        """How state is spread over the ranks."""
        if self.group is None:
            return Sharding()
        group = self.group
        return Sharding(rank=group.shard, size=len(group.sharers), stage=self.stage)
