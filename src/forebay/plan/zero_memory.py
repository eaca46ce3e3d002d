"""Bytes of weights, gradients and Adam's state under a ZeRO stage, before anything is built.

One process: the forecast that the engine itself refuses by. Several: the formulas of the ZeRO
papers, with forebay's bytes on the host. No activations, no workspaces. Every figure is for
16-bit weights unless a model's own spec says otherwise.

[Note: ZeRO's formulas] With M parameters on N devices: stage 2 keeps 2M + 14M/N bytes on each,
stage 3 16M/N; with the optimizer on the host 2M + 2M/N and 2M/N. Stage 3 computes in a gathered
layer: 2 bytes of weights and 2 of gradients for each of its elements. On the host a node keeps
14M / nodes: fp32 master and moments, and the gradient that landed; 16M / nodes with fp32 sums of
several backwards. Weights on the host are the high halves of its split masters and add nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from forebay.model.layout import ITEM_BYTES, layout_unit
from forebay.model.spec import ModelSpec, ParamSpec, UnitSpec
from forebay.plan.memory import backlog_bytes, forecast
from forebay.plan.placement import Accumulation, Placement, UnitPlacement, UpdatePlace

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "Backwards",
    "Cluster",
    "Offload",
    "ZeroMemory",
    "blocks",
    "in_one_process",
    "in_several_processes",
]

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
    """A gradient keeps its own dtype."""
    SEVERAL = "several"
    """Gradients add up in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """How many devices train together."""

    devices_per_node: int = 1
    nodes: int = 1

    @property
    def devices(self) -> int:
        """All of them."""
        return self.devices_per_node * self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroMemory:
    """What one setup takes.

    Attributes:
        device_bytes: On each device.
        host_bytes: On each node's host.
    """

    device_bytes: int
    host_bytes: int


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


def in_one_process(spec: ModelSpec, *, offload: Offload, backwards: Backwards) -> ZeroMemory:
    """What the engine places, and the gradients that lie on the device beside it.

    Stages 0 to 3 are the same here; `Offload.PARAMETERS` is no placement of one process yet.
    """
    assert offload is not Offload.PARAMETERS
    on_host = offload is Offload.OPTIMIZER
    placement = Placement(
        units=tuple(
            UnitPlacement(
                layout=layout_unit(unit.name, index=index, params=unit.params),
                update=UpdatePlace.HOST if on_host else UpdatePlace.DEVICE,
            )
            for index, unit in enumerate(spec.units)
        ),
        accumulation=(Accumulation.SINGLE if backwards is Backwards.ONE else Accumulation.HOST_SUM),
        backwards_per_update=1 if backwards is Backwards.ONE else 2,
    )
    sizes = forecast(placement)
    # With state on the host gradients leave; without it they stay until the update.
    waiting = backlog_bytes(placement) if on_host else _gradient_bytes(spec, backwards)
    return ZeroMemory(
        device_bytes=_sum(sizes, "device") + waiting,
        host_bytes=_sum(sizes, "host"),
    )


def in_several_processes(
    elements: int,
    *,
    stage: int,
    offload: Offload,
    backwards: Backwards,
    cluster: Cluster,
    largest_layer: int = 0,
) -> ZeroMemory:
    """What each device and each node's host takes, by [Note: ZeRO's formulas].

    Args:
        elements: Trained parameters.
        stage: 2 or 3.
        offload: What lives on the host.
        backwards: What the host keeps of gradients.
        cluster: Where it trains.
        largest_layer: Parameters of the layer that is gathered at a time (stage 3).
    """
    gathered = 4 * largest_layer if stage == 3 else 0
    share = cluster.devices
    if offload is Offload.NONE:
        state = 14 * elements // share
        weights = 2 * elements if stage == 2 else 2 * elements // share
        return ZeroMemory(device_bytes=weights + state + gathered, host_bytes=0)
    item = 14 if backwards is Backwards.ONE else 16
    device = gathered
    if offload is Offload.OPTIMIZER:
        device += 2 * elements // share
        if stage == 2:
            device += 2 * elements
    return ZeroMemory(device_bytes=device, host_bytes=item * elements // cluster.nodes)


def _gradient_bytes(spec: ModelSpec, backwards: Backwards) -> int:
    several = backwards is Backwards.SEVERAL
    return sum(
        (4 if several else ITEM_BYTES[param.dtype]) * param.elements
        for unit in spec.units
        for param in unit.params
    )


def _sum(sizes: Mapping[tuple[str, str], int], tier: str) -> int:
    return sum(value for (where, _), value in sizes.items() if where == tier)
