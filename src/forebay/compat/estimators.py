"""DeepSpeed's memory estimators: a table on stdout of what a model takes, setup by setup.

The figures are not DeepSpeed's rules of thumb but the bytes that forebay's engine places, in one
process and over ranks (`forebay.plan.zero_memory`).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from forebay.compat.flags import check_flags
from forebay.errors import ConfigError
from forebay.model.spec import ModelSpec, ParamSpec, UnitSpec
from forebay.model.units import units_by_blocks
from forebay.model.whole import whole_modules
from forebay.plan.setup import Cluster
from forebay.plan.zero_memory import Backwards, Offload, ZeroMemory, blocks, zero_memory
from forebay.units_of_measure import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

__all__ = [
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]

_SPEAKS_OF = {Backwards.ONE: "one backward per update", Backwards.SEVERAL: "several backwards"}


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.0,
) -> tuple[int, int]:
    """Bytes for stage 2 with several backwards per update: (per node's host, per GPU)."""
    check_flags("estimate_zero2_model_states_mem_needs", cpu_offload=cpu_offload)
    size = _cold(total_params, largest=None)
    setup = _Setup(2, _cluster(num_gpus_per_node, num_nodes), _factor(additional_buffer_factor))
    offload = Offload.OPTIMIZER if cpu_offload else Offload.NONE
    memory = setup.memory(size, offload, Backwards.SEVERAL)
    return memory.host_bytes, memory.device_bytes


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print what stage 2 takes for a model, with and without `offload_optimizer`.

    Args:
        model: The model; on the meta device too. Its float32 weights are counted as bfloat16.
        num_gpus_per_node: GPUs in each node.
        num_nodes: Nodes.
        additional_buffer_factor: The host's figures are multiplied by it. DeepSpeed's default is
            1.5, a guess; buffers are in the figures here.

    Raises:
        ConfigError: An argument is refused, or the model has nothing to train.
    """
    setup = _Setup(2, _cluster(num_gpus_per_node, num_nodes), _factor(additional_buffer_factor))
    _print(_table(_live(model), setup))


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print the same for a model of which only the number of parameters is known."""
    setup = _Setup(2, _cluster(num_gpus_per_node, num_nodes), _factor(additional_buffer_factor))
    _print(_table(_cold(total_params, largest=None), setup))


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.0,
) -> tuple[int, int, int]:
    """Bytes for stage 3 with several backwards: (per node's host, per GPU, the largest layer's).

    `zero_init` changes nothing: a model moves parameter by parameter, however it was built.
    """
    check_flags(
        "estimate_zero3_model_states_mem_needs",
        cpu_offload=cpu_offload,
        cpu_offload_params=cpu_offload_params,
        zero_init=zero_init,
    )
    size = _cold(total_params, largest=largest_layer_params)
    setup = _Setup(3, _cluster(num_gpus_per_node, num_nodes), _factor(additional_buffer_factor))
    offload = Offload.NONE
    if cpu_offload:
        offload = Offload.PARAMETERS if cpu_offload_params else Offload.OPTIMIZER
    memory = setup.memory(size, offload, Backwards.SEVERAL)
    return memory.host_bytes, memory.device_bytes, 4 * largest_layer_params


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print what stage 3 takes for a model; see `estimate_zero2_..._all_live`."""
    setup = _Setup(3, _cluster(num_gpus_per_node, num_nodes), _factor(additional_buffer_factor))
    _print(_table(_live(model), setup))


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print the same for a model of which only these two sizes are known."""
    setup = _Setup(3, _cluster(num_gpus_per_node, num_nodes), _factor(additional_buffer_factor))
    _print(_table(_cold(total_params, largest=largest_layer_params), setup))


@dataclass(frozen=True, slots=True)
class _Size:
    """A model as the formulas see it; what is frozen only lies on the device."""

    spec: ModelSpec
    largest: int
    frozen_bytes: int = 0

    @property
    def elements(self) -> int:
        return self.spec.elements


@dataclass(frozen=True, slots=True)
class _Setup:
    """A stage on a cluster."""

    stage: int
    cluster: Cluster
    factor: float

    @property
    def rows(self) -> Iterator[tuple[Offload, Backwards]]:
        offloads = [Offload.OPTIMIZER, Offload.NONE]
        if self.stage == 3:
            offloads.insert(0, Offload.PARAMETERS)
        return ((offload, count) for offload in offloads for count in Backwards)

    def memory(self, size: _Size, offload: Offload, backwards: Backwards) -> ZeroMemory:
        memory = zero_memory(
            size.spec,
            stage=self.stage,
            offload=offload,
            backwards=backwards,
            cluster=self.cluster,
        )
        return ZeroMemory(
            device_bytes=memory.device_bytes + size.frozen_bytes,
            host_bytes=math.ceil(memory.host_bytes * self.factor),
            pool_bytes=memory.pool_bytes,
        )

    def options(self, offload: Offload, backwards: Backwards) -> str:
        where = "none" if offload is Offload.NONE else "cpu"
        words = f"{f'offload_optimizer={where},':24}{_SPEAKS_OF[backwards]}"
        if self.stage == 3:
            param = "cpu" if offload is Offload.PARAMETERS else "none"
            words = f"{f'offload_param={param},':20}{words}"
        return words


def _table(size: _Size, setup: _Setup) -> list[str]:
    cluster = setup.cluster
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)}"
    gpus = f"{cluster.devices_per_node} GPU{'s' * (cluster.devices_per_node > 1)}"
    layer = f", of which a layer has {size.largest:,} at most" if setup.stage == 3 else ""
    lines = [
        f"Weights (16-bit), gradients and Adam's state of {size.elements:,} parameters{layer};",
        f"stage {setup.stage} on {nodes} with {gpus}{' each' * (cluster.nodes > 1)}:",
        "  host/node |    per GPU | options",
    ]
    pool = 0
    for offload, backwards in setup.rows:
        memory = setup.memory(size, offload, backwards)
        pool = max(pool, memory.pool_bytes)
        lines.append(
            f"{format_bytes(memory.host_bytes):>11} | {format_bytes(memory.device_bytes):>10} | "
            f"{setup.options(offload, backwards)}"
        )
    if pool:
        lines.append(
            f"Where weights come and go, up to {format_bytes(pool)} of them are on each device at "
            "a time; stage3_max_live_parameters bounds it."
        )
    if cluster.devices > 1:
        lines.append("Room for exchanges between ranks is in the figures.")
    elif setup.stage == 3:
        lines.append("In one process stage 3 without offload_param places what stage 2 places.")
    lines.append("Activations, workspaces and the CUDA context come on top.")
    return lines


def _print(lines: Sequence[str]) -> None:
    # A table on stdout is what these functions are for.
    sys.stdout.write("\n".join(lines) + "\n")


def _live(model: nn.Module) -> _Size:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"a live estimate needs an nn.Module, not {type(model).__name__}",
            hint="with numbers alone call the function that ends in all_cold",
        )
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    if not trained:
        raise ConfigError("no parameter of the model requires a gradient")
    units = []
    for unit in units_by_blocks(model, trained=trained, whole=whole_modules(model)):
        params = tuple(
            ParamSpec(
                index=index,
                names=(unit.name,),
                shape=tuple(param.shape),
                dtype="float16" if param.dtype is torch.float16 else "bfloat16",
                group=0,
            )
            for index, param in enumerate(unit.params)
        )
        units.append(UnitSpec(name=unit.name, params=params))
    frozen = sum(
        param.numel() * (2 if param.dtype is torch.float32 else param.element_size())
        for param in model.parameters()
        if id(param) not in trained
    )
    return _Size(ModelSpec(units=tuple(units)), max(unit.elements for unit in units), frozen)


def _cold(total_params: int, *, largest: int | None) -> _Size:
    total = _whole_number("total_params", total_params)
    if largest is not None:
        largest = _whole_number("largest_layer_params", largest)
        if largest > total:
            raise ConfigError(
                f"largest_layer_params is {largest}, and total_params only {total_params}"
            )
    spec = blocks(total, largest=largest)
    return _Size(spec, max(unit.elements for unit in spec.units))


def _cluster(num_gpus_per_node: int, num_nodes: int) -> Cluster:
    return Cluster(
        devices_per_node=_whole_number("num_gpus_per_node", num_gpus_per_node),
        nodes=_whole_number("num_nodes", num_nodes),
    )


def _whole_number(name: str, value: float) -> int:
    """A count; 7e9 is one."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or value < 1 or value != int(value):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number from 1 on")
    return int(value)


def _factor(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"additional_buffer_factor is {value!r}; it must be a positive number")
    return float(value)
