"""Bytes of weights, gradients and Adam's state under a ZeRO stage, before anything is built.

The engine's own forecast, in one process and over ranks. No activations, no workspaces. Every
figure is for 16-bit weights unless a model's own spec says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from forebay.model.layout import layout_unit
from forebay.model.spec import ModelSpec, ParamSpec, UnitSpec
from forebay.plan.activations import Activations
from forebay.plan.device_peak import PeakWalk
from forebay.plan.memory import forecast
from forebay.plan.placement import (
    Accumulation,
    Placement,
    Sharding,
    UnitPlacement,
    UpdatePlace,
    WeightPlace,
)
from forebay.plan.pool_size import with_default_pool
from forebay.plan.setup import Cluster

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ALONE", "Backwards", "Offload", "ZeroMemory", "blocks", "zero_memory"]

ALONE: Final = Cluster()
_NOTHING: Final = Activations(kept=0, block=0, loss=0)

# Where nobody says how a model is divided: about as deep as one of tens of billions is.
_BLOCKS = 64


class Offload(Enum):
    """What lives in host memory."""

    NONE = "none"
    """Nothing."""
    OPTIMIZER = "optimizer"
    """Masters, moments and landed gradients."""
    PARAMETERS = "parameters"
    """The weights too (stage 3)."""


class Backwards(Enum):
    """How many backwards make one update."""

    ONE = "one"
    """In one process a gradient keeps its own dtype; sums over ranks are fp32."""
    SEVERAL = "several"
    """Gradients add up in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroMemory:
    """What one setup takes.

    Attributes:
        device_bytes: On each device.
        host_bytes: On each node's host.
        pool_bytes: Of each device's, what weights share that come and go.
    """

    device_bytes: int
    host_bytes: int
    pool_bytes: int = 0


def blocks(elements: int, *, largest: int | None = None) -> ModelSpec:
    """A model of which only sizes are known.

    Args:
        elements: Its parameters.
        largest: Those of its largest block; None cuts it into equal ones.

    Example:
        >>> [unit.elements for unit in blocks(10, largest=4).units]
        [4, 4, 2]
    """
    size = largest or -(-elements // _BLOCKS)
    units = []
    for index, start in enumerate(range(0, elements, size)):
        param = ParamSpec(
            index=index,
            names=(f"block {index}",),
            shape=(min(size, elements - start),),
            dtype="bfloat16",
            group=0,
        )
        units.append(UnitSpec(name=param.names[0], params=(param,)))
    return ModelSpec(units=tuple(units))


def zero_memory(
    spec: ModelSpec,
    *,
    stage: int,
    offload: Offload,
    backwards: Backwards,
    cluster: Cluster = ALONE,
) -> ZeroMemory:
    """What the engine places on each device and each node's host, and the gradients beside it.

    The first rank's; others have as much or less. In stage 3 over ranks, and with weights on the
    host, the pool that gathered or streamed weights share is in it, as large as without settings.

    Args:
        spec: Trained parameters, by unit.
        stage: 0 to 3; in one process all take the same.
        offload: What lives on the host.
        backwards: How many make one update.
        cluster: Where it trains.
    """
    placement = _placement(spec, stage=stage, offload=offload, backwards=backwards, cluster=cluster)
    sizes = forecast(placement)
    placed = _sum(sizes, "device")
    gradients = PeakWalk(placement).peak(_NOTHING, placed=placed).total
    return ZeroMemory(
        device_bytes=placed + gradients,
        host_bytes=_sum(sizes, "host") * cluster.devices_per_node,
        pool_bytes=placement.pool_bytes,
    )


def _placement(
    spec: ModelSpec, *, stage: int, offload: Offload, backwards: Backwards, cluster: Cluster
) -> Placement:
    ranks = cluster.devices
    weights = WeightPlace.DEVICE
    if offload is Offload.PARAMETERS:
        weights = WeightPlace.HOST
    elif stage == 3 and ranks > 1:
        weights = WeightPlace.RANKS
    sums = Accumulation.DEVICE_SUM if ranks > 1 else Accumulation.HOST_SUM
    placement = Placement(
        units=tuple(
            UnitPlacement(
                layout=layout_unit(unit.name, index=index, params=unit.params, world_size=ranks),
                update=UpdatePlace.DEVICE if offload is Offload.NONE else UpdatePlace.HOST,
                weights=weights,
            )
            for index, unit in enumerate(spec.units)
        ),
        accumulation=Accumulation.SINGLE if backwards is Backwards.ONE else sums,
        backwards_per_update=1 if backwards is Backwards.ONE else 2,
        sharding=Sharding(rank=0, size=ranks, stage=stage),
    )
    return with_default_pool(placement)


def _sum(sizes: Mapping[tuple[str, str], int], tier: str) -> int:
    return sum(value for (where, _), value in sizes.items() if where == tier)
