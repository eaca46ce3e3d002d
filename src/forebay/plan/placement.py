"""Where each unit's state lives and updates: frozen values that the engine follows.

No torch here. ZeRO stages and offloads are values of a placement, not different engines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from forebay.model.layout import ITEM_BYTES
from forebay.plan.load_rules import LoadRules
from forebay.plan.policies import EXACT, Delayed

if TYPE_CHECKING:
    from forebay.model.layout import PartLayout, Shard, UnitLayout
    from forebay.plan.policies import Policy

__all__ = [
    "Accumulation",
    "AccumulationOrder",
    "FileBuffers",
    "MasterLayout",
    "Placement",
    "Sharding",
    "SixteenBitMaster",
    "UnitPlacement",
    "UpdatePlace",
    "WeightPlace",
]


class UpdatePlace(Enum):
    """Where a unit's master and moments live and its update runs."""

    HOST = "host"
    """State in host memory, updated by the native pass; gradients go down, weights come up."""
    DEVICE = "device"
    """State in device memory, updated there; nothing crosses the link."""
    STREAMED = "streamed"
    """State in host memory; it comes up during backward, is updated on the device and goes back
    during the next forward. Where the device has no room at that time, as `HOST`."""
    NVME = "nvme"
    """State in files; it comes to host memory piece by piece, is updated there as `HOST`, and goes
    back."""

    @property
    def lands(self) -> bool:
        """Whether the gradient always goes to the host and the new weights come from there."""
        return self is UpdatePlace.HOST or self is UpdatePlace.NVME


class WeightPlace(Enum):
    """Where a unit's working weights live."""

    DEVICE = "device"
    """On the device for good."""
    HOST = "host"
    """On the host; each pass brings them up and lets go of them. Not with `UpdatePlace.DEVICE`."""
    NVME = "nvme"
    """In files; each pass reads them into host memory and brings them up from there. With
    `UpdatePlace.NVME` alone: where state is in host memory, so are the weights."""
    RANKS = "ranks"
    """A slice on the device of each rank; each pass gathers them and lets go of them (stage 3)."""

    @property
    def is_off_device(self) -> bool:
        """Whether they come to the device over the link."""
        return self is WeightPlace.HOST or self is WeightPlace.NVME


class Accumulation(Enum):
    """How the addends of a window become one gradient."""

    SINGLE = "single"
    """One backward per update: the addend travels in its own dtype."""
    DEVICE_SUM = "device_sum"
    """fp32 sum on the device, which leaves during the last backward: 4 bytes down."""
    HOST_SUM = "host_sum"
    """Every addend leaves in its own dtype and is added in fp32 on the host: 2k bytes down."""


class AccumulationOrder(Enum):
    """In which order a window's micro-batches pass the model."""

    MICROBATCH = "microbatch"
    """Each passes all of it before the next one."""
    LAYER = "layer"
    """All pass a block before the next block: for the window that is one backward, in which each
    parameter has an addend of every micro-batch."""


class MasterLayout(Enum):
    """How a parameter's fp32 master is stored."""

    WEIGHT = "weight"
    """The working weight is fp32 and is its own master."""
    SPLIT = "split"
    """The bf16 weight is the high half; 16 bits beside it complete the master, lossless."""
    WHOLE = "whole"
    """A separate fp32 master beside a 16-bit weight, or beside one that is older than it."""


class SixteenBitMaster(Enum):
    """Which layout bf16 weights take; both give the same bits."""

    SPLIT = "split"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How state is spread over ranks, seen from one of them.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        stage: 0: every rank holds all; 1: optimizer state is sharded; 2: gradients too; 3:
            parameters too.
    """

    rank: int = 0
    size: int = 1
    stage: int = 0

    def own(self, part: PartLayout) -> Shard:
        """The slice whose gradient this rank adds up."""
        return part.shard(self.rank)

    def state(self, part: PartLayout) -> Shard:
        """The slice whose master and moments this rank holds and updates."""
        return part.whole if self.stage == 0 else self.own(part)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlacement:
    """One unit, where it updates and where its weights live."""

    layout: UnitLayout
    update: UpdatePlace
    weights: WeightPlace = WeightPlace.DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class FileBuffers:
    """Host memory that state in files passes through.

    Attributes:
        count: Buffers, each for one piece, through which pieces come and go.
        held: Pieces that stay in memory beside them, the first ones in module order: these have no
            place in files.
        piece_elements: Elements of a piece, a multiple of `SUM_ELEMENTS`.
        reads_ahead: Whether a piece is read while others are updated, the first ones during
            backward; else when the one before it is done.
        writes_behind: Whether pieces are read before the one before them is written.
    """

    count: int = 4
    held: int = 0
    piece_elements: int = 4 << 20
    reads_ahead: bool = True
    writes_behind: bool = True

    def kept(self, pieces: int) -> range:
        """Of the pieces that come and go, by their number in a step, those still in a buffer.

        Buffers end a step with its last pieces, and those that the next one begins with stay.
        """
        if pieces <= self.count:
            return range(pieces)
        return range(pieces - self.count, self.count) if self.reads_ahead else range(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The whole model's placement.

    Attributes:
        units: Every unit in module order.
        frozen: Units of weights that are not trained and come and go as those of others; their
            indices follow.
        accumulation: How a window's addends are summed for units that update on the host.
        backwards_per_update: Backwards in a window as far as known; a hint, never a condition.
        bf16_master: Layout of masters behind bf16 weights.
        piece_elements: Elements of one piece of an update and of the copy that follows it.
        sharding: How state is spread over ranks.
        pool_bytes: Device bytes that streamed weights share; 0 without any.
        loads: What else bounds them.
        buffers: What state in files passes through.
        weight_buffers: What weights in files pass through; of these, count and piece alone.
        policy: When updates begin, and when new weights come into force.
        order: In which order micro-batches pass the model; in layer order a window is one backward.
        micro_batches: Of one backward: all of the window's in layer order, else 1.
    """

    units: tuple[UnitPlacement, ...]
    accumulation: Accumulation
    frozen: tuple[UnitPlacement, ...] = ()
    backwards_per_update: int = 1
    bf16_master: SixteenBitMaster = SixteenBitMaster.SPLIT
    piece_elements: int = 4 << 20  # 8 MiB of bf16: a link's bandwidth saturates from there on
    sharding: Sharding = Sharding()
    pool_bytes: int = 0
    loads: LoadRules = field(default_factory=LoadRules)
    buffers: FileBuffers = FileBuffers()
    weight_buffers: FileBuffers = FileBuffers(count=5)
    policy: Policy = EXACT
    order: AccumulationOrder = AccumulationOrder.MICROBATCH
    micro_batches: int = 1

    @property
    def keeps_local_sums(self) -> bool:
        """Whether a window's gradients are summed on each rank before ranks add up."""
        return self.sharding.stage < 2 or self.order is AccumulationOrder.LAYER

    @property
    def gathers_weights(self) -> bool:
        """Whether a unit's new weights are collected from the ranks after each update."""
        return self.sharding.size > 1 and self.sharding.stage > 0

    @property
    def sends_addends(self) -> bool:
        """Whether a unit's gradient goes to the host as the one addend that it is."""
        return self.accumulation is Accumulation.SINGLE and self.sharding.size == 1

    def streamed_item_bytes(self, dtype: str, *, weights: WeightPlace = WeightPlace.DEVICE) -> int:
        """Bytes per parameter that a streamed unit moves each way; 10 with split masters.

        Weights that live on the host travel with their state.
        """
        extra = {MasterLayout.WEIGHT: 0, MasterLayout.SPLIT: 2, MasterLayout.WHOLE: 4}
        own = ITEM_BYTES[dtype] if weights is WeightPlace.HOST else 0
        return 8 + extra[self.master_layout(dtype, update=UpdatePlace.STREAMED)] + own

    def master_layout(self, dtype: str, *, update: UpdatePlace) -> MasterLayout:
        """The layout of masters behind weights of `dtype` that update in a place.

        Masters in files are whole all the same: what is read from a drive need not come up from
        the device. So are those on the device whose weights come into force later than they.
        """
        if update is UpdatePlace.DEVICE and isinstance(self.policy, Delayed):
            return MasterLayout.WHOLE
        if dtype == "float32":
            return MasterLayout.WEIGHT
        if dtype == "bfloat16" and self.bf16_master is SixteenBitMaster.SPLIT:
            return MasterLayout.SPLIT
        return MasterLayout.WHOLE
