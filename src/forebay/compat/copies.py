"""Which ranks share a copy of the state, and how gradients travel between them: as configured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from forebay.comm.exchange import Exchange, Reduction
from forebay.compat.inputs import DTYPES
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.comm.torch_group import TorchGroup
    from forebay.config.resolved import ResolvedConfig

__all__ = ["exchange_of", "join_copies"]


def join_copies(group: TorchGroup, *, mesh: Any, sharers: int | None) -> None:
    """Let groups of ranks hold a copy of the state each, as a mesh or the configuration says.

    Raises:
        ConfigError: Both say so, or the mesh is none.
    """
    if mesh is None:
        if sharers is not None and sharers < group.size:
            group.split(sharers)
        return
    if sharers is not None:
        raise ConfigError(
            "initialize(mesh_param=...) and zero_optimization.mics_shard_size both say which ranks "
            "share a copy of the state",
            hint="leave one of them out",
        )
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"mesh_param is of type {type(mesh).__name__}, not a DeviceMesh",
            hint="torch.distributed.device_mesh.init_device_mesh(kind, (copies, sharers))",
        )
    group.follow(mesh)


def exchange_of(config: ResolvedConfig) -> Exchange:
    """How a configuration lets gradients travel."""
    spec = config.exchange
    dtype = None if spec.dtype is None else DTYPES[spec.dtype]
    return Exchange(reduction=Reduction(spec.reduction), dtype=dtype)
