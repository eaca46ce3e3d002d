"""One way to train: what is shared, what lies where, on how many devices. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from forebay.plan.placement import AccumulationOrder

if TYPE_CHECKING:
    from forebay.plan.workload import Workload

__all__ = [
    "CHECKPOINT_BYTES",
    "FOREBAY",
    "ONE_DEVICE",
    "Cluster",
    "Habits",
    "Home",
    "Overlap",
    "Setup",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """How many devices train together."""

    devices_per_node: int = 1
    nodes: int = 1

    @property
    def devices(self) -> int:
        """All of them."""
        return self.devices_per_node * self.nodes


class Home(Enum):
    """Where something lives between its uses."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class Overlap(Enum):
    """Whether something runs beside computation."""

    BESIDE = "beside"
    AFTER = "after"


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How a system does it: forebay's own by default, others' for figures that they published.

    Attributes:
        name: The system.
        host_bytes: Host bytes per parameter with optimizer state on the host or on drives; None
            for what the engine places.
        device_extra: Device bytes per parameter beyond the stage's formula.
        buckets: Device bytes for buckets that collectives go through.
        state_traffic: Bytes per parameter that state on drives moves in all; None for the engine's.
        update_traffic: Host memory traffic of an update per parameter; None for the engine's.
        collectives: Whether they run beside backward.
        update: Whether it runs beside the next forward.
        checkpoints: Where recomputation's inputs live.
        tiles: Pieces that a layer's largest matrix is cut into, each fetched by itself; 0 where
            whole units are.
    """

    name: str = "forebay"
    host_bytes: float | None = None
    device_extra: float = 0.0
    buckets: int = 0
    state_traffic: float | None = None
    update_traffic: float | None = None
    collectives: Overlap = Overlap.BESIDE
    update: Overlap = Overlap.BESIDE
    checkpoints: Home = Home.DEVICE
    tiles: int = 0


# What each device's process leaves of a host budget for blocks of a checkpoint, at the most.
CHECKPOINT_BYTES: Final = 16 << 20

FOREBAY = Habits()
ONE_DEVICE = Cluster()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One way to train.

    Attributes:
        stage: ZeRO's: 0 shares nothing, 1 optimizer state, 2 gradients too, 3 weights too.
        optimizer: Where masters and moments live.
        weights: Where working weights live (elsewhere than on the device in stage 3 alone).
        workload: What each device computes.
        cluster: Devices and nodes.
        habits: Whose system.
        host_budget: With state on drives, bytes of each node's host memory that training may take
            beside its checkpoints: what fits stays there. None where all of it is on drives.
        weights_in_memory: With weights on drives, elements of them that each device's process
            keeps in host memory, as far as the host budget has room.
    """

    stage: int
    optimizer: Home
    weights: Home
    workload: Workload
    cluster: Cluster = ONE_DEVICE
    habits: Habits = FOREBAY
    host_budget: int | None = None
    weights_in_memory: int = 0

    @property
    def ranks(self) -> int:
        """Devices that share state: all, over those that share each layer."""
        return max(1, self.cluster.devices // self.workload.tensor_parallel)

    @property
    def label(self) -> str:
        """A short name.

        Example:
            >>> from forebay.plan.workload import Workload
            >>> Setup(
            ...     stage=2, optimizer=Home.HOST, weights=Home.DEVICE, workload=Workload()
            ... ).label
            'stage 2, optimizer on host'
        """
        words = f"stage {self.stage}"
        if self.optimizer is not Home.DEVICE:
            words += f", optimizer on {self.optimizer.value}"
        if self.weights is not Home.DEVICE:
            words += f", weights on {self.weights.value}"
        if self.workload.order is AccumulationOrder.LAYER:
            words += ", layer order"
        return words
